//! `queen-proxy dev`: what a newcomer runs first.

use crate::support::{Process, free_port};
use nix::sys::signal::Signal;
use std::{
    net::TcpListener,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

struct Dev {
    process: Process,
    started: Instant,
    /// Holds the log.
    _folder: tempfile::TempDir,
}

impl Dev {
    fn start(data: &Path, extra: &[&str], ports: (u16, u16)) -> Self {
        let (port, cell_port) = (ports.0.to_string(), ports.1.to_string());
        let data = data.to_str().unwrap();
        let admin_port = free_port().to_string();
        let mut arguments = vec!["dev", "--data", data, "--port", &port, "--cell-port", &cell_port];
        arguments.extend(["--admin-port", &admin_port]);
        arguments.extend(extra);
        let folder = tempfile::TempDir::new().unwrap();
        let process =
            Process::start("dev", env!("CARGO_BIN_EXE_queen-proxy"), &arguments, &[], folder.path());
        Self { process, started: Instant::now(), _folder: folder }
    }

    fn wait_for(&mut self, text: &str, limit: Duration) -> String {
        loop {
            let log = self.process.log();
            if log.contains(text) {
                return log;
            }
            assert!(!self.process.has_ended(), "it ended:\n{log}");
            assert!(self.started.elapsed() < limit, "no {text:?} within {limit:?}:\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn stop(mut self) -> String {
        self.process.signal(Signal::SIGINT);
        let status = self.process.wait(Duration::from_secs(20)).expect("Ctrl-C ends it");
        assert!(status.success(), "{status}");
        self.process.log()
    }
}

fn paste(line: &str) -> serde_json::Value {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{line}: {}", String::from_utf8_lossy(&output.stdout)))
}

fn curl_lines(log: &str) -> Vec<String> {
    log.lines().filter(|line| line.starts_with("curl ")).map(str::to_owned).collect()
}

/// Processes with this folder on their command line.
fn processes_of(folder: &Path) -> Vec<String> {
    let needle = folder.to_str().unwrap();
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let line = std::fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    entries.filter(|line| line.contains(needle)).collect()
}

#[test]
fn the_lines_it_prints_work_and_a_second_run_finds_its_data() {
    let folder = tempfile::TempDir::new_in(std::env::temp_dir()).unwrap();
    let data = folder.path().join("data");
    // PostgreSQL runs as another user when we are root.
    open_to_all(folder.path());
    let ports = (free_port(), free_port());

    let mut first = Dev::start(&data, &[], ports);
    first.wait_for("starting", Duration::from_secs(2));
    let log = first.wait_for("Ctrl-C stops everything", Duration::from_secs(60));
    let lines = curl_lines(&log);
    assert_eq!(lines.len(), 4);
    assert_eq!(paste(&lines[0])["applied"], true);
    assert_eq!(paste(&lines[1])["value"]["greeting"], "hello");
    assert_eq!(paste(&lines[2])["found"], false);
    assert_eq!(paste(&lines[3])["acting_cluster"]["slug"], "acme-prod");
    // A second one beside it must not stop the first one's server.
    let (other, another) = (free_port().to_string(), free_port().to_string());
    let beside = gives_up(&["--data", data.to_str().unwrap(), "--port", &other, "--cell-port", &another]);
    assert!(beside.contains("another dev uses"), "{beside}");
    assert_eq!(paste(&lines[1])["value"]["greeting"], "hello");
    first.stop();
    assert_eq!(processes_of(&data), [""; 0], "nothing is left running");

    let mut second = Dev::start(&data, &[], ports);
    let log = second.wait_for("Ctrl-C stops everything", Duration::from_secs(60));
    assert_eq!(curl_lines(&log), lines, "the same tenants with the same keys");
    assert_eq!(paste(&lines[1])["value"]["greeting"], "hello", "the data is still there");
    second.stop();
    assert_eq!(processes_of(&data), [""; 0]);
}

#[test]
fn a_throw_away_run_leaves_nothing_and_a_killed_one_is_taken_over() {
    let folder = tempfile::TempDir::new_in(std::env::temp_dir()).unwrap();
    open_to_all(folder.path());
    let data = folder.path().join("data");
    let ports = (free_port(), free_port());
    let mut throw_away = Dev::start(&data, &["--ephemeral"], ports);
    let log = throw_away.wait_for("Ctrl-C stops everything", Duration::from_secs(60));
    assert_eq!(paste(&curl_lines(&log)[0])["applied"], true);
    throw_away.stop();
    assert!(!data.exists());
    let private = log.lines().find_map(|line| line.split("private server in ").nth(1)).unwrap();
    assert!(!Path::new(private.trim()).exists());

    let mut killed = Dev::start(&data, &[], ports);
    killed.wait_for("Ctrl-C stops everything", Duration::from_secs(60));
    killed.process.signal(Signal::SIGKILL);
    killed.process.wait(Duration::from_secs(10)).expect("killed");
    let mut after = Dev::start(&data, &[], ports);
    let log = after.wait_for("Ctrl-C stops everything", Duration::from_secs(60));
    assert_eq!(paste(&curl_lines(&log)[1])["found"], false);
    after.stop();
    assert_eq!(processes_of(&data), [""; 0]);
}

/// Runs `dev` with these arguments, expects it to give up, and returns its one line.
fn gives_up(arguments: &[&str]) -> String {
    let binary = env!("CARGO_BIN_EXE_queen-proxy");
    let admin_port = free_port().to_string();
    let output =
        Command::new(binary).args(["dev", "--admin-port", &admin_port]).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {errors}");
    assert_eq!(errors.lines().count(), 1, "{arguments:?}: {errors}");
    errors
}

#[test]
fn what_is_in_the_way_is_said_in_one_line() {
    let taken = TcpListener::bind(("127.0.0.1", free_port())).unwrap();
    let taken = taken.local_addr().unwrap().port().to_string();
    let (free, other) = (free_port().to_string(), free_port().to_string());
    let ports = ["--port", &free, "--cell-port", &other];
    let folder = tempfile::TempDir::new().unwrap();
    let data = folder.path().to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--ephemeral", "--port", &taken, "--cell-port", &free], "in use (the proxy)"),
        (&["--ephemeral", "--port", &free, "--cell-port", &taken], "in use (the cell)"),
        (&["--ephemeral", "--port", &free, "--cell-port", &free], "two are the same"),
        (&["--data", "/dev/full/data", ports[0], ports[1], ports[2], ports[3]], "/dev/full/data"),
        (
            &["--data", data, "--database-url", "mysql://x", ports[0], ports[1], ports[2], ports[3]],
            "must begin with postgres://",
        ),
    ];
    for (arguments, want) in cases {
        let line = gives_up(arguments);
        assert!(line.contains(want), "{arguments:?}: {line}");
    }
    a_full_disk(&ports);
}

/// A file system of 8 MiB holds no PostgreSQL. Mounting one takes root, which CI is.
fn a_full_disk(ports: &[&str; 4]) {
    let folder = tempfile::TempDir::new().unwrap();
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
        .arg(folder.path())
        .output()
        .is_ok_and(|output| output.status.success());
    if !mount {
        println!("a full disk cannot be shown: mounting a small file system takes root");
        return;
    }
    open_to_all(folder.path());
    let data = folder.path().join("data");
    let line = gives_up(&["--data", data.to_str().unwrap(), ports[0], ports[1], ports[2], ports[3]]);
    Command::new("umount").arg(folder.path()).status().unwrap();
    assert!(line.contains("No space left on device"), "{line}");
}

fn open_to_all(folder: &Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
}
