//! A mixed load whose cell keeps books of what it did: pushes with duplicates and failures, transactions that roll
//! back, pops, KV. In the end `usage_days` says what the books say, to the message and to the byte.

use super::{Told, Totals, totals, world};
use crate::support::{Recorded, Socket, Tenant, World, seconds};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Numbers that look random and are the same each time.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What the cell did.
#[derive(Default)]
pub struct Truth(Mutex<Totals>);

impl Truth {
    pub fn totals(&self) -> Totals {
        self.0.lock().unwrap().clone()
    }

    fn note(&self, request: &Recorded, op: &str, msgs: u64, bytes_in: usize, answer: &Value) -> String {
        let text = answer.to_string();
        let slug = request.all("x-cluster").first().copied().unwrap_or_default().to_owned();
        let mut totals = self.0.lock().unwrap();
        let row = totals.entry((slug, op.to_owned())).or_default();
        for (sum, more) in row.iter_mut().zip([1, msgs, bytes_in as u64, text.len() as u64]) {
            *sum += more;
        }
        text
    }

    /// Does what a request asks for, or fails to, and writes down what became of it.
    pub fn answer(&self, dice: &Mutex<Dice>, request: &Recorded) -> Told {
        let roll = |limit| dice.lock().unwrap().below(limit);
        let length = request.body.len();
        let path = request.line.split([' ', '?']).nth(1).unwrap_or_default();
        let (op, status, msgs, bytes_in, answer) = match path {
            "/api/v1/push" => {
                let body: Value = serde_json::from_slice(&request.body).unwrap();
                let mut stored = 0;
                let results: Vec<Value> = body["items"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|_| {
                        let status = ["queued", "queued", "queued", "buffered", "duplicate", "failed"]
                            [usize::try_from(roll(6)).unwrap()];
                        stored += u64::from(matches!(status, "queued" | "buffered"));
                        json!({ "status": status, "transactionId": "t" })
                    })
                    .collect();
                match roll(12) {
                    0 => ("push", 500, 0, length, json!({ "error": "nothing was stored" })),
                    1 => ("push", 400, 0, length, json!({ "error": "nothing was stored" })),
                    _ => ("push", 201, stored, length, Value::Array(results)),
                }
            }
            "/api/v1/transaction" => {
                let body: Value = serde_json::from_slice(&request.body).unwrap();
                let mut stored = 0;
                let results: Vec<Value> = body["operations"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|operation| {
                        if operation["type"] == "ack" {
                            return json!({ "type": "ack", "success": true });
                        }
                        let duplicate = roll(4) == 0;
                        stored += u64::from(!duplicate);
                        json!({ "type": "push", "duplicate": duplicate })
                    })
                    .collect();
                let success = roll(3) > 0;
                let answer = json!({ "transactionId": "t", "success": success, "results": results });
                ("txn", 200, if success { stored } else { 0 }, length, answer)
            }
            "/api/v1/pop/queue/q" => {
                let messages: Vec<Value> = (0..roll(6))
                    .map(|n| json!({ "id": n, "data": { "messages": [1, 2], "text": "x\"]}".repeat(20) } }))
                    .collect();
                let answer = json!({ "messages": messages, "success": !messages.is_empty() });
                ("delivery", 200, messages.len() as u64, 0, answer)
            }
            "/api/v1/configure" => ("configure", 200, 0, length, json!({ "ok": true })),
            _ if roll(9) == 0 => ("read", 503, 0, 0, json!({ "error": "kv_unavailable" })),
            _ => ("read", 200, 0, 0, json!({ "found": true, "value": [1, 2, 3] })),
        };
        let text = self.note(request, op, msgs, bytes_in, &answer);
        Told::answer(status, text).header("x-op", op).header("x-msgs", msgs)
    }
}

/// An exchange that a client saw whole.
#[derive(Clone, Debug)]
pub struct Seen {
    pub at: Instant,
    pub proxy: usize,
    pub key: (String, String),
    pub msgs: u64,
}

/// Clients that go on until they are told to stop.
pub struct Clients {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Seen>>>,
    tasks: JoinSet<()>,
    /// Requests that found no proxy, or no whole answer.
    pub cut: Arc<AtomicUsize>,
}

impl Clients {
    pub fn start(world: &World, count: u64, tenants: &[Tenant]) -> Self {
        let ports: Arc<[u16]> = world.proxies.iter().map(|(port, _)| *port).collect();
        let tenants: Arc<[Tenant]> = tenants.into();
        let stop: Arc<AtomicBool> = Arc::default();
        let (seen, cut) = (Arc::<Mutex<Vec<Seen>>>::default(), Arc::<AtomicUsize>::default());
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let proxy = usize::try_from(number).unwrap() % ports.len();
            let client = Client {
                proxy,
                port: ports[proxy],
                socket: None,
                tenants: Arc::clone(&tenants),
                dice: Dice::new(number),
                seen: Arc::clone(&seen),
                cut: Arc::clone(&cut),
            };
            tasks.spawn(client.run(Arc::clone(&stop)));
        }
        Self { stop, seen, tasks, cut }
    }

    /// Lets each finish what it has begun; what they saw.
    pub async fn stop(self) -> Vec<Seen> {
        self.stop.store(true, SeqCst);
        self.tasks.join_all().await;
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

struct Client {
    proxy: usize,
    port: u16,
    socket: Option<Socket>,
    tenants: Arc<[Tenant]>,
    dice: Dice,
    seen: Arc<Mutex<Vec<Seen>>>,
    cut: Arc<AtomicUsize>,
}

impl Client {
    async fn run(mut self, stop: Arc<AtomicBool>) {
        while !stop.load(SeqCst) {
            if !self.exchange().await {
                self.socket = None;
                self.cut.fetch_add(1, SeqCst);
            }
        }
    }

    /// One request; false: its proxy went away.
    async fn exchange(&mut self) -> bool {
        let which = usize::try_from(self.dice.below(self.tenants.len() as u64)).unwrap();
        let tenant = self.tenants[which].clone();
        let (line, body) = self.request();
        if self.socket.is_none() {
            self.socket = Socket::try_open(self.port).await;
        }
        let Some(socket) = &mut self.socket else {
            tokio::time::sleep(Duration::from_millis(5)).await;
            return false;
        };
        let (headers, length) = (tenant.headers(), body.len());
        let head = format!("{line} HTTP/1.1\r\n{headers}x-cluster: {}\r\n", tenant.slug);
        // Both framings of a request.
        let request = if body.is_empty() {
            format!("{head}\r\n")
        } else if self.dice.below(3) == 0 {
            format!("{head}Transfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n0\r\n\r\n")
        } else {
            format!("{head}Content-Length: {length}\r\n\r\n{body}")
        };
        if !socket.send(request).await {
            return false;
        }
        let Some(answer) = socket.answer().await else { return false };
        if answer.header("connection") == Some("close") {
            self.socket = None;
        }
        match (answer.header("x-op"), answer.header("x-msgs")) {
            (Some(op), Some(msgs)) => self.seen.lock().unwrap().push(Seen {
                at: Instant::now(),
                proxy: self.proxy,
                key: (tenant.slug, op.to_owned()),
                msgs: msgs.parse().unwrap(),
            }),
            // A cluster that is not there any more.
            _ => assert!(matches!(answer.status, 401 | 403 | 421), "{answer:?}"),
        }
        true
    }

    fn request(&mut self) -> (&'static str, String) {
        let items = 1 + self.dice.below(5);
        match self.dice.below(10) {
            0..=3 => ("POST /api/v1/push", super::push_of(usize::try_from(items).unwrap())),
            4 | 5 => {
                let pushes = (0..items).map(|n| json!({ "type": "push", "queue": "q", "payload": n }));
                let ack = json!({ "type": "ack", "transactionId": "t", "partitionId": "p" });
                let operations: Vec<Value> = pushes.chain([ack]).collect();
                ("POST /api/v1/transaction", json!({ "operations": operations }).to_string())
            }
            6 | 7 => ("GET /api/v1/pop/queue/q?batch=5", String::new()),
            8 => ("PUT /api/v1/kv/ns/k", r#"{"value":1,"forever":true}"#.to_owned()),
            9 if items == 1 => ("POST /api/v1/configure", r#"{"queue":"q"}"#.to_owned()),
            _ => ("GET /api/v1/kv/ns/k", String::new()),
        }
    }
}

/// A world of this many proxies, whose cell keeps the books that are returned.
pub async fn world_with_books(builder: crate::support::WorldBuilder) -> (World, super::Books, Arc<Truth>) {
    let truth: Arc<Truth> = Arc::default();
    let (books, dice) = (Arc::clone(&truth), Mutex::new(Dice::new(39)));
    let (world, cell) = world(builder, move |request| books.answer(&dice, request)).await;
    (world, cell, truth)
}

pub fn messages(totals: &Totals) -> u64 {
    totals.values().map(|row| row[1]).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mixed_load_over_two_proxies_is_in_usage_days_to_the_message() {
    let builder = World::builder().proxies(2).env("QUEEN_PROXY_METER_FLUSH_MS", 300);
    let (mut world, _cell, truth) = world_with_books(builder).await;
    let mut tenants = Vec::new();
    for name in ["acme", "globex", "initech", "doomed"] {
        tenants.push(world.tenant(name).await);
    }
    let length = seconds(4);
    let began = Instant::now();
    let clients = Clients::start(&world, 8, &tenants);
    tokio::time::sleep(length / 2).await;
    // One is deleted while its usage is being counted and flushed.
    world.sql(&format!("SELECT queen_proxy.delete_tenant('{}', true)", tenants[3].tenant)).await;
    tokio::time::sleep(length.saturating_sub(began.elapsed())).await;
    assert_eq!(clients.cut.load(SeqCst), 0, "no request was lost");
    let seen = clients.stop().await;
    for proxy in 0..2 {
        world.stop_proxy(proxy);
    }

    let mut expected = truth.totals();
    expected.retain(|(slug, _), _| slug != &tenants[3].slug);
    let ops: std::collections::BTreeSet<&str> = expected.keys().map(|(_, op)| op.as_str()).collect();
    assert_eq!(ops.into_iter().collect::<Vec<_>>(), ["configure", "delivery", "push", "read", "txn"]);
    assert!(messages(&expected) > 100, "{expected:?}");
    assert_eq!(totals(&world, "usage_minutes").await, expected);
    // A day later.
    world.sql("UPDATE queen_proxy.usage_minutes SET minute = minute - interval '1 day'").await;
    world.sql("SELECT queen_proxy.maintain_usage(90)").await;
    assert_eq!(totals(&world, "usage_days").await, expected);
    let mut by_op: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for ((_, op), row) in &expected {
        let sum = by_op.entry(op).or_default();
        (sum[0], sum[1]) = (sum[0] + row[0], sum[1] + row[1]);
    }
    println!("{length:?}: {} exchanges; requests and messages {by_op:?}: equal", seen.len());
}
