//! What the kernel says of a process and its children: time on a processor, memory.

use std::{collections::HashMap, fs};

/// The process and all below it.
pub fn tree(root: u32) -> Vec<u32> {
    let mut parents: Vec<(u32, u32)> = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // It may have ended meanwhile.
        let Some(parent) = stat(&format!("/proc/{id}")).and_then(|fields| fields[1].parse().ok()) else {
            continue;
        };
        parents.push((id, parent));
    }
    let mut found = vec![root];
    let mut at = 0;
    while at < found.len() {
        let one = found[at];
        found.extend(parents.iter().filter(|(_, parent)| *parent == one).map(|(id, _)| *id));
        at += 1;
    }
    found
}

/// The fields after the name in parentheses: the state, the parent, …
fn stat(folder: &str) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace().map(str::to_owned).collect())
}

/// Nanoseconds on a processor so far, in user and in system mode, of each thread.
pub struct Cpu(HashMap<u32, u64>);

impl Cpu {
    pub fn of(root: u32) -> Self {
        let mut threads = HashMap::new();
        for process in tree(root) {
            let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { continue };
            for task in tasks.flatten() {
                let folder = task.path();
                let folder = folder.to_str().unwrap();
                let Some(id) = task.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
                if let Some(time) = on_processor(folder) {
                    threads.insert(id, time);
                }
            }
        }
        Self(threads)
    }

    /// What was added since. Of threads that ended meanwhile nothing is known any more.
    pub fn since(&self, before: &Self) -> u64 {
        self.0.iter().map(|(id, time)| time.saturating_sub(before.0.get(id).copied().unwrap_or(0))).sum()
    }
}

/// From `schedstat` in nanoseconds, or where the kernel has none, from `stat` in hundredths.
fn on_processor(task: &str) -> Option<u64> {
    if let Ok(text) = fs::read_to_string(format!("{task}/schedstat")) {
        return text.split_ascii_whitespace().next()?.parse().ok();
    }
    let fields = stat(task)?;
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks * 10_000_000)
}

/// Resident memory in bytes.
pub fn resident(root: u32) -> u64 {
    let of = |process: u32| {
        let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let line = status.lines().find(|line| line.starts_with("VmRSS"))?;
        Some(line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    };
    tree(root).into_iter().filter_map(of).sum()
}
