//! `admin outbox follow`: every event comes out, and is consumed once it is out.

use super::{Admin, query};
use crate::support::{World, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

const LIMIT: Duration = Duration::from_secs(30);
const UNCONSUMED: &str = "SELECT count(*) FROM queen_proxy.outbox WHERE consumed_at IS NULL";

async fn emit(world: &World, count: u32) {
    world
        .sql(&format!(
            "SELECT queen_proxy.emit_outbox('tested', jsonb_build_object('number', n)) FROM generate_series(1, {count}) AS n"
        ))
        .await;
}

/// A follower whose output the test reads, or does not.
fn follower(admin: &Admin) -> Child {
    Command::new(env!("CARGO_BIN_EXE_queen-proxy"))
        .args(["admin", "outbox", "follow", "--json"])
        .env_clear()
        .envs(admin.environment.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

/// Exit code of a program that ends by itself, and what it wrote to standard error.
async fn end(mut child: Child) -> (Option<i32>, String) {
    let status = eventually("an end", LIMIT, async || child.try_wait().unwrap()).await;
    (status.code(), std::io::read_to_string(child.stderr.take().unwrap()).unwrap())
}

fn numbers(output: ChildStdout) -> Vec<i64> {
    let lines = BufReader::new(output).lines();
    let events = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    events.filter_map(|event| event["payload"]["number"].as_i64()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn once_prints_what_is_there_and_ends() {
    let (world, admin) = Admin::alone().await;
    assert_eq!(admin.ok(&["outbox", "follow", "--once"]), "");
    admin.acme("shared-a");
    emit(&world, 250).await;
    let out = admin.ok(&["outbox", "follow", "--once", "--json"]);
    let events: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 251);
    assert_eq!(
        (&events[0]["kind"], &events[0]["payload"]["tenant_slug"]),
        (&"tenant_bootstrapped".into(), &"acme".into())
    );
    assert!(events[0]["created_at"].as_str().unwrap().ends_with('Z') && events[0]["id"].is_string());
    assert_eq!(query(&world, UNCONSUMED).await, "0");
    assert_eq!(admin.ok(&["outbox", "follow", "--once", "--json"]), "", "each once");
    world.sql("SELECT queen_proxy.emit_outbox(E'odd \\x1b[2J', '{\"a\": 1}')").await;
    let line = admin.ok(&["outbox", "follow", "--once"]);
    assert!(line.ends_with("Z  odd \u{fffd}[2J  {\"a\":1}\n"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_followers_share_the_events_and_a_signal_ends_them() {
    let (world, admin) = Admin::alone().await;
    let mut followers = [follower(&admin), follower(&admin)];
    let outputs = followers.each_mut().map(|follower| follower.stdout.take().unwrap());
    let readers = outputs.map(|output| std::thread::spawn(move || numbers(output)));
    for _ in 0..4 {
        emit(&world, 500).await;
    }
    eventually("all are consumed", LIMIT, async || (query(&world, UNCONSUMED).await == "0").then_some(()))
        .await;
    signal(&followers[0], Signal::SIGTERM);
    signal(&followers[1], Signal::SIGINT);
    let mut printed: BTreeMap<i64, u32> = BTreeMap::new();
    for (follower, reader) in followers.into_iter().zip(readers) {
        let (code, error) = end(follower).await;
        assert_eq!((code, error.as_str()), (Some(0), ""));
        for number in reader.join().unwrap() {
            *printed.entry(number).or_default() += 1;
        }
    }
    assert_eq!(printed.len(), 500);
    assert!(printed.values().all(|&times| times == 4), "each exactly once, when nobody dies");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_follower_could_not_print_comes_to_the_next() {
    let (world, admin) = Admin::alone().await;
    // It has claimed some, and waits for a reader who does not read.
    world.sql("SELECT queen_proxy.emit_outbox('large', jsonb_build_object('text', repeat('x', 9000))) FROM generate_series(1, 150)").await;
    let stuck = follower(&admin);
    let claimed = "SELECT count(*) FROM queen_proxy.outbox WHERE claimed_until > now()";
    eventually("it has claimed", LIMIT, async || (query(&world, claimed).await == "100").then_some(())).await;
    // Another one does not wait for it.
    let others = admin.ok(&["outbox", "follow", "--once", "--json"]);
    assert_eq!(others.lines().count(), 50);
    signal(&stuck, Signal::SIGTERM);
    let (code, error) = end(stuck).await;
    assert_eq!((code, error.as_str()), (Some(0), ""));
    assert_eq!(query(&world, claimed).await, "0", "it gave them back");
    assert_eq!(admin.ok(&["outbox", "follow", "--once", "--json"]).lines().count(), 100);

    // A claim of one that was killed runs out.
    emit(&world, 3).await;
    world.sql("UPDATE queen_proxy.outbox SET claimed_until = now() + interval '1 hour' WHERE consumed_at IS NULL").await;
    assert_eq!(admin.ok(&["outbox", "follow", "--once", "--json"]), "");
    world.sql("UPDATE queen_proxy.outbox SET claimed_until = now() - interval '1 second' WHERE consumed_at IS NULL").await;
    assert_eq!(admin.ok(&["outbox", "follow", "--once", "--json"]).lines().count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_goes_away_ends_it_with_and_without_events() {
    let (world, admin) = Admin::alone().await;
    let mut idle = follower(&admin);
    drop(idle.stdout.take());
    assert_eq!(end(idle).await, (Some(0), String::new()));
    emit(&world, 1).await;
    assert_eq!(query(&world, UNCONSUMED).await, "1");
    let mut busy = follower(&admin);
    let mut output = BufReader::new(busy.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert!(line.contains("\"number\":1"), "{line}");
    eventually("it is consumed", LIMIT, async || (query(&world, UNCONSUMED).await == "0").then_some(()))
        .await;
    drop(output);
    assert_eq!(end(busy).await, (Some(0), String::new()));
}
