//! What the proxy counts (D13). Names begin with `queen_proxy_`, units are base units, and no label has a
//! value that a client chooses.

use dashmap::DashMap;
use prometheus::{
    CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    Opts, Registry, TextEncoder, core::Collector, process_collector::ProcessCollector,
};
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Upper bounds of the latency buckets, in seconds: a long poll takes up to 90 s.
const BUCKETS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 30.0, 90.0];

/// Those of the proxy's own share, in seconds: mostly tens of microseconds.
const OWN_BUCKETS: [f64; 14] =
    [0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0];

/// The type of what [`Metrics::render`] writes.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// A request that is over.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// What kind of route it was for.
    pub class: &'static str,
    /// The status that was sent; 0 when the client went away before.
    pub status: u16,
    /// The refusal's code; "ok" for what was forwarded or served.
    pub code: &'static str,
    /// From the parsed head to the end of the answer.
    pub took: Duration,
    /// From choosing the cell to the head of its answer, if it gave one.
    pub cell: Option<Duration>,
}

/// All of it.
pub struct Metrics {
    registry: Registry,
    requests: IntCounterVec,
    durations: HistogramVec,
    cell_durations: HistogramVec,
    own_durations: HistogramVec,
    denials: IntCounterVec,
    upstream_errors: IntCounterVec,
    // The children by their labels in sharded maps, so that requests do not share one lock.
    counted: DashMap<(&'static str, u16, &'static str), IntCounter>,
    timed: DashMap<&'static str, Timed>,
    denied: DashMap<(&'static str, bool), IntCounter>,
    /// What fills in the figures that others keep, when somebody asks.
    readers: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
}

/// The histograms of one class.
struct Timed {
    whole: Histogram,
    cell: Histogram,
    own: Histogram,
}

impl Timed {
    fn observe(&self, request: &Finished) {
        self.whole.observe(request.took.as_secs_f64());
        let cell = request.cell.unwrap_or_default();
        if request.cell.is_some() {
            self.cell.observe(cell.as_secs_f64());
        }
        self.own.observe(request.took.saturating_sub(cell).as_secs_f64());
    }
}

impl Metrics {
    /// Nothing is counted yet.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let requests = IntCounterVec::new(
            Opts::new(
                "queen_proxy_requests_total",
                "Requests that are over, by route class, status and code",
            ),
            &["class", "status", "code"],
        )?;
        let histogram = |name: &str, help: &str, buckets: [f64; 14]| {
            HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), &["class"])
        };
        let durations = histogram(
            "queen_proxy_request_duration_seconds",
            "From the parsed head of a request to the end of its answer",
            BUCKETS,
        )?;
        let cell_durations = histogram(
            "queen_proxy_cell_duration_seconds",
            "From choosing the cell to the head of its answer",
            BUCKETS,
        )?;
        let own_durations = histogram(
            "queen_proxy_own_duration_seconds",
            "The duration of a request without the cell's share: the proxy's work, and the client's pace",
            OWN_BUCKETS,
        )?;
        let denials = IntCounterVec::new(
            Opts::new(
                "queen_proxy_limit_denials_total",
                "Requests over a limit: refused, or only counted (would_block)",
            ),
            &["limit", "outcome"],
        )?;
        let upstream_errors = IntCounterVec::new(
            Opts::new(
                "queen_proxy_upstream_errors_total",
                "Exchanges with a cell that failed, tries that were made again included, by cause",
            ),
            &["cause"],
        )?;
        let build = Gauge::with_opts(
            Opts::new("queen_proxy_build_info", "Always 1; the version is in the label")
                .const_label("version", env!("CARGO_PKG_VERSION")),
        )?;
        build.set(1.0);
        for collector in [
            Box::new(requests.clone()) as Box<dyn Collector>,
            Box::new(durations.clone()),
            Box::new(cell_durations.clone()),
            Box::new(own_durations.clone()),
            Box::new(denials.clone()),
            Box::new(upstream_errors.clone()),
            Box::new(build),
            Box::new(ProcessCollector::for_self()),
        ] {
            registry.register(collector)?;
        }
        Ok(Self {
            registry,
            requests,
            durations,
            cell_durations,
            own_durations,
            denials,
            upstream_errors,
            counted: DashMap::new(),
            timed: DashMap::new(),
            denied: DashMap::new(),
            readers: Mutex::default(),
        })
    }

    /// Counts a request.
    pub fn finished(&self, request: Finished) {
        let key = (request.class, request.status, request.code);
        match self.counted.get(&key) {
            Some(counter) => counter.inc(),
            None => {
                let status = request.status.to_string();
                let counter = self.requests.with_label_values(&[request.class, &status, request.code]);
                counter.inc();
                self.counted.insert(key, counter);
            }
        }
        if let Some(timed) = self.timed.get(request.class) {
            timed.observe(&request);
            return;
        }
        let class = [request.class];
        let timed = Timed {
            whole: self.durations.with_label_values(&class),
            cell: self.cell_durations.with_label_values(&class),
            own: self.own_durations.with_label_values(&class),
        };
        timed.observe(&request);
        self.timed.insert(request.class, timed);
    }

    /// Counts a failed exchange with a cell.
    pub fn upstream_error(&self, cause: &'static str) {
        self.upstream_errors.with_label_values(&[cause]).inc();
    }

    /// How many requests ended since the start, by status and code.
    pub fn ended(&self) -> Vec<(u16, &'static str, u64)> {
        let mut ended: HashMap<_, u64> = HashMap::new();
        for counter in &self.counted {
            let (_, status, code) = *counter.key();
            *ended.entry((status, code)).or_default() += counter.get();
        }
        ended.into_iter().map(|((status, code), count)| (status, code, count)).collect()
    }

    /// How long the proxy's own share took since the start, of all classes: for each upper bound in seconds,
    /// the last of which is infinite, how many requests took no longer.
    pub fn own_durations(&self) -> Vec<(f64, u64)> {
        let mut sums: Vec<(f64, u64)> = OWN_BUCKETS.iter().map(|bound| (*bound, 0)).collect();
        sums.push((f64::INFINITY, 0));
        for family in self.own_durations.collect() {
            for metric in family.get_metric() {
                let histogram = metric.get_histogram();
                for (sum, bucket) in sums.iter_mut().zip(histogram.get_bucket()) {
                    sum.1 += bucket.cumulative_count();
                }
                if let Some(all) = sums.last_mut() {
                    all.1 += histogram.get_sample_count();
                }
            }
        }
        sums
    }

    /// Counts a request over a limit, which it met or only would have met.
    pub fn denied(&self, limit: &'static str, refused: bool) {
        let counter = self.denied.entry((limit, refused)).or_insert_with(|| {
            self.denials.with_label_values(&[limit, if refused { "refused" } else { "would_block" }])
        });
        counter.inc();
    }

    /// A figure that somebody else keeps.
    pub fn gauge(
        &self,
        name: &str,
        help: &str,
        read: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let gauge = Gauge::new(name, help)?;
        self.registry.register(Box::new(gauge.clone()))?;
        self.read(move || gauge.set(read()));
        Ok(())
    }

    /// A count since the start that somebody else keeps.
    pub fn counter(
        &self,
        name: &str,
        help: &str,
        read: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let counter = IntCounter::new(name, help)?;
        self.registry.register(Box::new(counter.clone()))?;
        self.read(move || {
            counter.reset();
            counter.inc_by(read());
        });
        Ok(())
    }

    /// Figures of several things of a kind, in bounded number, by the label `label`.
    pub fn gauges(
        &self,
        name: &str,
        help: &str,
        label: &str,
        read: impl Fn() -> Vec<(String, f64)> + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let gauges = GaugeVec::new(Opts::new(name, help), &[label])?;
        self.registry.register(Box::new(gauges.clone()))?;
        self.read(move || {
            gauges.reset();
            for (value, figure) in read() {
                gauges.with_label_values(&[&value]).set(figure);
            }
        });
        Ok(())
    }

    /// Counts since the start of several things of a kind, in bounded number, by `labels`.
    pub fn counters<const N: usize>(
        &self,
        name: &str,
        help: &str,
        labels: [&str; N],
        read: impl Fn() -> Vec<([String; N], f64)> + Send + Sync + 'static,
    ) -> Result<(), prometheus::Error> {
        let counters = CounterVec::new(Opts::new(name, help), &labels)?;
        self.registry.register(Box::new(counters.clone()))?;
        self.read(move || {
            // Things that are no more leave no series behind.
            counters.reset();
            for (values, count) in read() {
                counters.with_label_values(&values.each_ref().map(String::as_str)).inc_by(count);
            }
        });
        Ok(())
    }

    /// Everything in the text format of Prometheus.
    pub fn render(&self) -> Vec<u8> {
        // One scrape at a time fills the figures in, so that none sees a half of them.
        let readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.iter().for_each(|read| read());
        let mut text = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::error!(%error, "metrics cannot be written");
        }
        text
    }

    fn read(&self, read: impl Fn() + Send + Sync + 'static) {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(read));
    }
}

#[cfg(test)]
mod tests {
    use super::{Finished, Metrics};
    use std::time::Duration;

    #[test]
    fn what_is_counted_is_rendered() {
        let metrics = Metrics::new().unwrap();
        metrics.gauge("queen_proxy_parked", "Waiting pops", || 7.0).unwrap();
        metrics
            .counters("queen_proxy_hits_total", "Hits", ["cache"], || vec![(["keys".to_owned()], 3.0)])
            .unwrap();
        metrics.gauges("queen_proxy_ages", "Ages", "cell", || vec![("a".to_owned(), 0.5)]).unwrap();
        assert!(metrics.gauge("queen_proxy_parked", "again", || 0.0).is_err());
        let request =
            Finished { class: "read", status: 200, code: "ok", took: Duration::from_millis(3), cell: None };
        metrics.finished(request);
        metrics.finished(Finished { cell: Some(Duration::from_millis(2)), ..request });
        assert_eq!(metrics.ended(), [(200, "ok", 2)]);
        let own = metrics.own_durations();
        assert!(own.contains(&(0.001, 1)) && own.contains(&(0.005, 2)) && own.contains(&(f64::INFINITY, 2)));
        metrics.upstream_error("refused");
        metrics.denied("req", true);
        metrics.denied("req", false);
        metrics.denied("req", false);
        for _ in 0..2 {
            let text = String::from_utf8(metrics.render()).unwrap();
            for line in [
                r#"queen_proxy_requests_total{class="read",code="ok",status="200"} 2"#,
                r#"queen_proxy_request_duration_seconds_bucket{class="read",le="0.005"} 2"#,
                r#"queen_proxy_request_duration_seconds_bucket{class="read",le="0.0025"} 0"#,
                r#"queen_proxy_cell_duration_seconds_count{class="read"} 1"#,
                r#"queen_proxy_own_duration_seconds_bucket{class="read",le="0.001"} 1"#,
                r#"queen_proxy_own_duration_seconds_count{class="read"} 2"#,
                r#"queen_proxy_upstream_errors_total{cause="refused"} 1"#,
                r#"queen_proxy_limit_denials_total{limit="req",outcome="would_block"} 2"#,
                "queen_proxy_parked 7",
                r#"queen_proxy_hits_total{cache="keys"} 3"#,
                r#"queen_proxy_ages{cell="a"} 0.5"#,
                concat!(r#"queen_proxy_build_info{version=""#, env!("CARGO_PKG_VERSION"), r#""} 1"#),
            ] {
                assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
            }
        }
    }
}
