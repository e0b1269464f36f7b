//! The tables: median, least and greatest of the rounds, and ratios within the rounds.

use crate::{Options, candidates::Candidate, load::Load};
use std::{fs, process::Command};
use time::OffsetDateTime;

/// What a turn of a candidate came to, as far as it can be told.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sample {
    pub cpu_us: Option<f64>,
    pub rate: Option<f64>,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub p999_us: Option<f64>,
    pub poll_kib: Option<f64>,
    pub resident_mib: Option<f64>,
}

impl Sample {
    /// Not so of polls that go straight to the upstream.
    pub fn is_something(&self) -> bool {
        COLUMNS.iter().any(|(_, figure)| figure(self).is_some())
    }
}

/// A column: its name, and where its figure is.
type Column = (&'static str, fn(&Sample) -> Option<f64>);

const COLUMNS: [Column; 7] = [
    ("CPU µs a request", |sample| sample.cpu_us),
    ("requests/s", |sample| sample.rate),
    ("p50 µs", |sample| sample.p50_us),
    ("p99 µs", |sample| sample.p99_us),
    ("p99.9 µs", |sample| sample.p999_us),
    ("KiB a poll", |sample| sample.poll_kib),
    ("RSS MiB", |sample| sample.resident_mib),
];

/// Whom ours is set beside.
const RIVALS: [Candidate; 3] = [Candidate::HaproxyGateway, Candidate::NginxLua, Candidate::Bare];

/// The samples of a load, by candidate, in the order of the rounds.
struct Table {
    load: Load,
    rows: Vec<(Candidate, Vec<Sample>)>,
}

#[derive(Default)]
pub struct Report {
    tables: Vec<Table>,
}

impl Report {
    pub fn add(&mut self, load: Load, candidate: Candidate, sample: Sample) {
        let at = self.tables.iter().position(|table| table.load == load).unwrap_or_else(|| {
            self.tables.push(Table { load, rows: Vec::new() });
            self.tables.len() - 1
        });
        let rows = &mut self.tables[at].rows;
        match rows.iter_mut().find(|(name, _)| *name == candidate) {
            Some((_, samples)) => samples.push(sample),
            None => rows.push((candidate, vec![sample])),
        }
    }

    pub fn print(&self) {
        for table in &self.tables {
            table.print();
        }
    }
}

impl Table {
    fn of(&self, candidate: Candidate) -> Option<&[Sample]> {
        self.rows.iter().find(|(name, _)| *name == candidate).map(|(_, samples)| &**samples)
    }

    fn print(&self) {
        let told = |(_, figure): &&Column| {
            self.rows.iter().any(|(_, samples)| samples.iter().any(|sample| figure(sample).is_some()))
        };
        let columns: Vec<&Column> = COLUMNS.iter().filter(told).collect();
        println!("\n### {}\n", self.load.name());
        print_head("", &columns);
        for (candidate, samples) in &self.rows {
            let cells = columns.iter().map(|(_, figure)| spread(samples.iter().filter_map(figure), amount));
            println!("| {} | {} |", candidate.name(), cells.collect::<Vec<_>>().join(" | "));
        }
        let Some(ours) = self.of(Candidate::Ours) else { return };
        let rivals = RIVALS.iter().filter_map(|rival| Some((rival, self.of(*rival)?)));
        for (number, (rival, theirs)) in rivals.enumerate() {
            if number == 0 {
                println!();
                print_head("ratio", &columns);
            }
            let cells = columns.iter().map(|(_, figure)| {
                let ratios =
                    ours.iter().zip(theirs).filter_map(|(our, their)| Some(figure(our)? / figure(their)?));
                spread(ratios, |ratio| format!("{ratio:.2}"))
            });
            println!("| ours / {} | {} |", rival.name(), cells.collect::<Vec<_>>().join(" | "));
        }
    }
}

fn print_head(first: &str, columns: &[&Column]) {
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    println!("| {first} | {} |", names.join(" | "));
    println!("|---|{}", "---|".repeat(columns.len()));
}

/// The median, with the least and the greatest in parentheses.
fn spread(figures: impl Iterator<Item = f64>, show: fn(f64) -> String) -> String {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let (Some(least), Some(greatest)) = (figures.first(), figures.last()) else { return "–".to_owned() };
    let (low, high) = (figures[(figures.len() - 1) / 2], figures[figures.len() / 2]);
    let median = show(f64::midpoint(low, high));
    if figures.len() == 1 { median } else { format!("{median} ({}–{})", show(*least), show(*greatest)) }
}

fn amount(figure: f64) -> String {
    if figure < 100.0 { format!("{figure:.1}") } else { format!("{figure:.0}") }
}

/// When, where and with what.
pub fn print_machine(options: &Options, polls: usize) {
    let line = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().ok();
        let text = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().next().unwrap_or("not there").to_owned()
    };
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    println!(
        "{}; {} × {}, Linux {}; load average {}",
        OffsetDateTime::now_utc().date(),
        std::thread::available_parallelism().map_or(1, usize::from),
        model.map_or("an unnamed processor", |(_, model)| model),
        kernel.trim(),
        fs::read_to_string("/proc/loadavg").unwrap_or_default().trim(),
    );
    println!("Pingora 0.9.1; {}; {}", line("nginx", "-v"), line("haproxy", "-v"));
    println!(
        "{} rounds of {} s, {} connections, {} clusters, {} polls, {} thread(s) a candidate",
        options.rounds, options.seconds, options.connections, options.clusters, polls, options.threads
    );
}
