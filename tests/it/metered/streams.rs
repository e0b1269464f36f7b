//! Answers are read as they pass: nothing is held back, and nothing is kept.

use super::{Told, books::Body, usage, world};
use crate::support::World;
use std::{sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Notify,
    time::timeout,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_first_bytes_of_a_metered_answer_are_not_held_back() {
    const FIRST: &str = r#"{"messages":[{"data":1},"#;
    const REST: &str = r#"{"data":2}],"success":true}"#;
    let gate = Arc::new(Notify::new());
    let at_cell = Arc::clone(&gate);
    let (mut world, _cell) = world(World::builder(), move |_| {
        Told::body(200, Body::Held(FIRST.into(), Arc::clone(&at_cell), REST.into()))
    })
    .await;
    let acme = world.tenant("acme").await;
    let mut stream = TcpStream::connect(("127.0.0.1", world.port())).await.unwrap();
    let request = format!("GET /api/v1/pop/queue/q HTTP/1.1\r\n{}Connection: close\r\n\r\n", acme.headers());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    let mut piece = [0; 4_096];
    // The cell says nothing more until we have this.
    while !text.contains(FIRST) {
        let read = timeout(Duration::from_secs(20), stream.read(&mut piece)).await;
        let count = read.expect("the first bytes, before the last ones exist").unwrap();
        assert!(count > 0, "{text}");
        text.push_str(std::str::from_utf8(&piece[..count]).unwrap());
    }
    assert!(!text.contains(REST));
    gate.notify_one();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.contains(REST));
    world.stop_proxy(0);
    let length = (FIRST.len() + REST.len()) as u64;
    assert_eq!(usage(&world).await.into_values().collect::<Vec<_>>(), [[1, 2, 0, length]]);
}

/// `VmHWM` and `VmRSS`, in bytes.
fn memory(pid: i32, which: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(which)).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread")]
async fn pops_of_64_mib_take_no_memory() {
    const PAYLOAD: usize = 1 << 20;
    let text = format!("{}\\\"", "x{[,]}".repeat(21)).repeat(PAYLOAD / 128);
    let again = [br#"{"data":""#, text.as_bytes(), b"\"},"].concat();
    let length = again.len();
    let (mut world, _cell) = world(World::builder(), move |request| {
        if request.line.ends_with("batch=1") {
            return Told::answer(200, r#"{"messages":[1]}"#);
        }
        let (first, again, last) = (br#"{"messages":["#.into(), again.clone(), b"7]}".into());
        Told::body(200, Body::Long { first, again, times: 64, last })
    })
    .await;
    let acme = world.tenant("acme").await;
    let pop = async |batch: u32| {
        let line = format!("GET /api/v1/pop/queue/q?batch={batch} HTTP/1.1\r\n");
        let request = format!("{line}{}Connection: close\r\n\r\n", acme.headers());
        let mut stream = TcpStream::connect(("127.0.0.1", world.port())).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut sum = 0;
        let mut piece = vec![0; 1 << 16];
        loop {
            match stream.read(&mut piece).await.unwrap() {
                0 => return sum,
                count => sum += count,
            }
        }
    };
    pop(1).await;
    let pid = world.proxies[0].1.id();
    let before = memory(pid, "VmRSS");
    let read = tokio::join!(pop(100), pop(100));
    assert!(read.0 > 64 << 20 && read.1 > 64 << 20, "{read:?}");
    let grown = memory(pid, "VmHWM").saturating_sub(before);
    println!("two pops of 64 MiB at once: {} KiB more at the peak", grown >> 10);
    assert!(grown < 16 << 20, "{grown} bytes");
    world.stop_proxy(0);
    let bytes = 2 * (13 + 64 * length + 3) as u64 + 16;
    assert_eq!(usage(&world).await.into_values().collect::<Vec<_>>(), [[3, 131, 0, bytes]]);
}

/// A client that leaves before the end has what came before it, and pays for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pop_that_its_client_does_not_read_to_the_end_is_billed() {
    let again = [br#"{"data":""#, "x".repeat(1 << 20).as_bytes(), b"\"},"].concat();
    let (mut world, _cell) = world(World::builder(), move |_| {
        let (first, again, last) = (br#"{"messages":["#.into(), again.clone(), b"7]}".into());
        Told::body(200, Body::Long { first, again, times: 64, last })
    })
    .await;
    let acme = world.tenant("acme").await;
    let mut stream = TcpStream::connect(("127.0.0.1", world.port())).await.unwrap();
    let request = format!("GET /api/v1/pop/queue/q HTTP/1.1\r\n{}\r\n", acme.headers());
    stream.write_all(request.as_bytes()).await.unwrap();
    let (mut read, mut piece) = (0, vec![0; 1 << 16]);
    while read < 10 << 20 {
        read += stream.read(&mut piece).await.unwrap();
    }
    drop(stream);
    world.stop_proxy(0);
    let rows: Vec<[u64; 4]> = usage(&world).await.into_values().collect();
    assert!(rows.len() == 1 && rows[0][0] == 1 && (10..=65).contains(&rows[0][1]), "{rows:?}");
    assert!(!world.proxies[0].1.log().contains("bills no messages"));
}
