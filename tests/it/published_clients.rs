//! The clients people have installed, as published, through the proxy into a real cell: the crate
//! `queen-mq` 2.7.0 and the Python package `queen-mq` 1.3.0.

use crate::support::{Socket, Tenant, World, eventually};
use queen_mq::{Config, Error, Expiry, Kv, KvOperation, KvOutcome, KvReason, Queen};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::process::Command;

const NS: &str = "rust";

/// A client of one tenant that does not repeat what fails.
fn client(world: &World, tenant: &Tenant) -> Kv {
    client_with(world, &tenant.host(), &tenant.key)
}

fn client_with(world: &World, host: &str, key: &str) -> Kv {
    queen_with(world, host, key).kv()
}

fn queen_with(world: &World, host: &str, key: &str) -> Queen {
    let port = world.port();
    let config = Config::new(format!("http://127.0.0.1:{port}"))
        .host_header(format!("{host}:{port}"))
        .unwrap()
        .bearer_token(key)
        .retry_attempts(1);
    Queen::connect(config).unwrap()
}

/// Status and code of a refusal; the cell has no code, its word is the message.
fn refusal(error: &Error) -> (Option<u16>, String) {
    match error {
        Error::Http { code: Some(code), .. } => (error.status(), code.as_str().to_owned()),
        Error::Http { message, .. } => (error.status(), message.clone()),
        other => panic!("no refusal: {other}"),
    }
}

/// The keys under a prefix, page by page, and the number of pages.
async fn walk(kv: &Kv, prefix: &str, limit: u32) -> (Vec<String>, usize) {
    let (mut keys, mut pages) = (Vec::<String>::new(), 0);
    loop {
        let mut query = kv.get_prefix(NS, prefix).limit(limit);
        if let Some(last) = keys.last() {
            query = query.after(last);
        }
        let page = query.send().await.unwrap();
        pages += 1;
        for row in page.rows() {
            assert_eq!(row.value, Some(json!({"key": row.key})));
            keys.push(row.key.clone());
        }
        assert_eq!(page.next_after.as_ref(), page.truncated().then(|| keys.last().unwrap()));
        if !page.truncated() {
            return (keys, pages);
        }
    }
}

async fn store_walked_keys(kv: &Kv, count: usize) -> Vec<String> {
    let keys: Vec<String> = (0..count).map(|n| format!("walk:{n:03}")).collect();
    for some in keys.chunks(100) {
        let puts = some
            .iter()
            .map(|key| KvOperation::put(NS, key, json!({"key": key}), Expiry::seconds(600)).unwrap());
        let stored = kv.batch(puts.collect()).await.unwrap();
        assert!(
            stored.results().len() == some.len() && stored.results().iter().all(queen_mq::KvResult::applied)
        );
    }
    keys
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_client_gets_what_it_put() {
    let world = World::new().await;
    let kv = client(&world, &world.tenant("acme").await);

    for key in ["plain", "a/b c+ü", "a//b", "100%", "👑"] {
        let miss = kv.get(NS, key).await.unwrap();
        assert_eq!((miss.found(), miss.value, miss.version), (false, None, None), "{key}");
        let put = kv.put(NS, key, json!({"k": [key, null]}), Expiry::Forever).send().await.unwrap();
        assert_eq!((put.applied(), put.reason, put.key.as_deref()), (true, None, Some(key)));
        let got = kv.get(NS, key).await.unwrap();
        assert_eq!(
            (got.found(), got.value, got.version),
            (true, Some(json!({"k": [key, null]})), put.version),
            "{key}"
        );
        assert_eq!((got.expires_at, got.updated_at.is_some()), (None, true));
        let gone = kv.delete(NS, key).send().await.unwrap();
        assert_eq!((gone.applied(), gone.version), (true, put.version), "{key}");
        let again = kv.delete(NS, key).send().await.unwrap();
        assert_eq!(
            (again.applied(), again.reason, again.version),
            (false, Some(KvReason::Absent), Some(0)),
            "{key}"
        );
    }
    kv.put(NS, "null", Value::Null, Expiry::seconds(60)).send().await.unwrap();
    let null = kv.get(NS, "null").await.unwrap();
    assert_eq!((null.found(), null.value, null.expires_at.is_some()), (true, Some(Value::Null), true));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_client_hears_who_won() {
    let world = World::new().await;
    let kv = client(&world, &world.tenant("acme").await);

    let first = kv.put_if_absent(NS, "idem", json!("a"), Expiry::seconds(60)).send().await.unwrap();
    assert!(first.applied());
    let version = first.version.unwrap();
    let taken = |result: queen_mq::KvResult, reason| {
        assert_eq!((result.applied(), result.reason), (false, Some(reason)));
        assert_eq!((result.value, result.version), (Some(json!("a")), Some(version)));
    };
    let claim = || kv.put_if_absent(NS, "idem", json!("b"), Expiry::Forever);
    let put = |expect| kv.put(NS, "idem", json!("b"), Expiry::Forever).expect(expect);
    taken(claim().send().await.unwrap(), KvReason::Exists);
    taken(claim().required().send().await.unwrap(), KvReason::Exists);
    taken(put(0).required().send().await.unwrap(), KvReason::Exists);
    taken(put(version + 1).send().await.unwrap(), KvReason::Version);
    taken(put(version + 1).required().send().await.unwrap(), KvReason::Version);
    taken(kv.delete(NS, "idem").expect(version + 1).required().send().await.unwrap(), KvReason::Version);

    let together = vec![
        KvOperation::put(NS, "beside", json!(1), Expiry::Forever).unwrap(),
        claim().required().operation().unwrap(),
    ];
    let KvOutcome::Precondition(lost) = kv.batch(together).await.unwrap() else {
        panic!("a batch that lost")
    };
    assert_eq!(
        (lost.failed_index, lost.reason, lost.version),
        (Some(1), Some(KvReason::Exists), Some(version))
    );
    assert!(!kv.get(NS, "beside").await.unwrap().found());
    let swapped = put(version).send().await.unwrap();
    assert!(swapped.applied() && swapped.version != Some(version));

    for (value, applied) in [(1, true), (2, true), (2, false)] {
        let count = kv.incr(NS, "count", 1, Expiry::seconds(60)).max(2).send().await.unwrap();
        assert_eq!((count.counter(), count.applied()), (Ok(value), applied));
        assert_eq!(count.reason, (!applied).then_some(KvReason::Limit));
    }
    let floor = kv.incr(NS, "count", -3, Expiry::Forever).min(0).required().send().await.unwrap();
    assert_eq!((floor.counter(), floor.reason), (Ok(2), Some(KvReason::Limit)));
    let mistyped = kv.incr(NS, "idem", 1, Expiry::Forever).send().await.unwrap();
    assert_eq!((mistyped.counter(), mistyped.reason), (Ok(0), Some(KvReason::Type)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_client_walks_its_own_keys_and_no_other_tenants() {
    let world = World::new().await;
    let (acme, globex) = (world.tenant("acme").await, world.tenant("globex").await);
    let (own, other) = (client(&world, &acme), client(&world, &globex));
    let keys = store_walked_keys(&own, 230).await;
    let others = store_walked_keys(&other, 3).await;
    own.put(NS, "walk%", json!(1), Expiry::Forever).send().await.unwrap();
    assert_eq!(walk(&own, "walk:", 50).await, (keys.clone(), 5));
    assert_eq!(walk(&own, "walk:", 115).await, (keys.clone(), 2));
    assert_eq!(walk(&other, "walk:", 50).await, (others, 1));

    let bare = own.get_prefix(NS, "walk:").after(&keys[227]).keys_only().send().await.unwrap();
    let rows: Vec<_> = bare.rows().iter().map(|row| (&row.key, row.value.is_some())).collect();
    assert_eq!(rows, [(&keys[228], false), (&keys[229], false)]);
    let wanted = vec![keys[3].clone(), "nope".to_owned(), keys[1].clone()];
    for (kv, found, missing) in [(&own, 2, vec!["nope"]), (&other, 1, vec!["walk:003", "nope"])] {
        let many = kv.get_many(NS, wanted.clone()).await.unwrap();
        assert_eq!(
            (many.rows().len(), many.missing().iter().map(String::as_str).collect::<Vec<_>>()),
            (found, missing)
        );
        assert_eq!(many.rows()[0].key, keys[1]);
    }
    other.delete(NS, &keys[1]).send().await.unwrap();
    assert!(own.get(NS, &keys[1]).await.unwrap().found());

    for (host, key, status, code) in [
        (acme.host(), globex.key.as_str(), 403, "forbidden"),
        (globex.host(), acme.key.as_str(), 403, "forbidden"),
        (acme.host(), "qk_live_nobody", 401, "unauthorized"),
        ("nobody.q.example".to_owned(), acme.key.as_str(), 421, "cluster_unknown"),
    ] {
        let error = client_with(&world, &host, key).get(NS, &keys[1]).await.unwrap_err();
        assert_eq!(refusal(&error), (Some(status), code.to_owned()), "{host}");
    }
    let long = "k".repeat(513);
    for (ns, key, status, code) in
        [("Upper", "k", 400, "kv_bad_request"), (NS, long.as_str(), 413, "payload_too_large")]
    {
        let error = own.get(ns, key).await.unwrap_err();
        assert_eq!(refusal(&error), (Some(status), code.to_owned()), "{key} of {ns}");
        assert!(!error.is_retryable());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_client_commits_bundles_of_key_value_operations() {
    let world = World::new().await;
    let acme = world.tenant("acme").await;
    let queen = queen_with(&world, &acme.host(), &acme.key);
    let kv = queen.kv();
    let hour = || Expiry::seconds(3600);
    let bundle = || {
        let counted = kv.incr(NS, "count", 2, Expiry::Forever).max(2).operation().unwrap();
        let marked = queen.transaction().kv_put_if_absent(NS, "mark", json!("done"), hour()).unwrap();
        let stated = marked.kv_put(NS, "state", json!({"n": 1.5}), hour()).unwrap().kv(counted);
        stated.kv(KvOperation::get(NS, "state")).kv_delete(NS, "nothing")
    };
    let done = bundle().commit().await.unwrap();
    assert!(done.success && done.lost_precondition().is_none() && !done.transaction_id.is_empty());
    let slots: Vec<_> =
        done.results.iter().map(|slot| (slot.index, slot.op_index, slot.op_type.as_str())).collect();
    assert_eq!(slots, [0, 1, 2, 3, 4].map(|at| (at, Some(at), "kv")));
    let results = done.kv_results();
    assert_eq!(results.len(), 5, "every slot is readable as the client's own result");
    assert!(results[0].applied() && results[1].applied() && results[3].found());
    assert_eq!((results[2].counter(), results[3].version), (Ok(2), results[1].version));
    assert_eq!((results[4].applied(), results[4].reason), (false, Some(KvReason::Absent)));

    let lost = bundle().commit().await.unwrap().lost_precondition().expect("a redelivery");
    assert_eq!(
        (lost.failed_index, lost.reason, lost.version),
        (Some(0), Some(KvReason::Exists), results[0].version)
    );
    assert_eq!(lost.value, Some(json!("done")));
    assert_eq!(kv.get(NS, "count").await.unwrap().value, Some(json!(2)), "nothing was counted twice");

    // What this cell does not have says so, and stores nothing.
    let pushed =
        queen.transaction().push("q", json!(1)).unwrap().kv_put(NS, "beside", json!(1), hour()).unwrap();
    let error = pushed.commit().await.unwrap_err();
    assert_eq!(error.status(), Some(400));
    assert!(error.to_string().contains("push") && !error.is_retryable(), "{error}");
    let checked =
        queen.transaction().kv_check(NS, "mark", results[0].version.unwrap()).commit().await.unwrap_err();
    assert!(checked.to_string().contains("kv_unknown_op"), "{checked}");
    let checked = kv.check(NS, "mark", 0).await.unwrap_err();
    assert_eq!((checked.status(), refusal(&checked).1.as_str()), (Some(400), "kv_bad_request"));
    assert!(!kv.get(NS, "beside").await.unwrap().found());
}

/// Puts a tenant on billing hold and waits until the proxy knows.
async fn block_pushes(world: &World, tenant: &Tenant) {
    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'grace')", tenant.tenant)).await;
    let body = r#"{"value":1,"forever":true}"#;
    eventually("the push block bites", Duration::from_secs(5), async || {
        let put = world.ask("PUT /api/v1/kv/probe/k", &tenant.headers(), body).await;
        (put.status == 403).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_client_of_a_push_blocked_tenant_reads_and_removes_but_adds_nothing() {
    let world = World::new().await;
    let (acme, globex) = (world.tenant("acme").await, world.tenant("globex").await);
    let kv = client(&world, &acme);
    let keys = store_walked_keys(&kv, 3).await;
    block_pushes(&world, &acme).await;

    let put = || kv.put(NS, "new", json!(1), Expiry::Forever);
    let mixed = vec![KvOperation::get(NS, &keys[0]), put().operation().unwrap()];
    for (what, error) in [
        ("put", put().send().await.unwrap_err()),
        ("put_if_absent", kv.put_if_absent(NS, "new", json!(1), Expiry::Forever).send().await.unwrap_err()),
        ("incr", kv.incr(NS, "new", 1, Expiry::Forever).send().await.unwrap_err()),
        ("batch", kv.batch(mixed).await.unwrap_err()),
    ] {
        assert_eq!(refusal(&error), (Some(403), "push_blocked".to_owned()), "{what}");
        assert!(error.is_terminal_refusal() && !error.is_retryable(), "{what}");
    }
    assert_eq!(walk(&kv, "walk:", 2).await, (keys.clone(), 2));
    assert!(kv.get(NS, &keys[0]).await.unwrap().found());
    assert_eq!(kv.get_many(NS, vec!["new".to_owned()]).await.unwrap().missing(), ["new"]);
    assert!(kv.delete(NS, &keys[0]).send().await.unwrap().applied());
    assert!(
        client(&world, &globex).put(NS, "new", json!(1), Expiry::Forever).send().await.unwrap().applied()
    );

    world.sql(&format!("SELECT queen_proxy.set_tenant_status('{}', 'active')", acme.tenant)).await;
    eventually("the hold is over", Duration::from_secs(5), async || put().send().await.ok()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_finds_its_whole_key_value_api() {
    let python = python_client().await;
    let world = World::new().await;
    let (acme, globex) = (world.tenant("acme").await, world.tenant("globex").await);
    let url = format!("http://127.0.0.1:{}", world.port());
    let own = [url.as_str(), &acme.host(), &acme.key].map(str::to_owned);
    let other = [globex.host(), globex.key.clone()];
    run_script(&python, "walk", own.iter().chain(&other)).await;
    block_pushes(&world, &acme).await;
    run_script(&python, "blocked", &own).await;
}

async fn run_script(python: &Path, part: &str, arguments: impl IntoIterator<Item = &String>) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/python/kv.py");
    let mut command = Command::new(python);
    command.arg("-B").arg(script).arg(part).args(arguments).env("NO_PROXY", "*");
    run(&mut command).await.unwrap_or_else(|output| panic!("kv.py {part}:\n{output}"));
}

/// Runs a command to its end; what it wrote, when it fails.
async fn run(command: &mut Command) -> Result<(), String> {
    let output = command.kill_on_drop(true).output().await.map_err(|error| error.to_string())?;
    let written = [output.stdout, output.stderr].concat();
    output.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&written).into_owned())
}

/// The interpreter of a virtual environment with the published client, made once and kept under `target`.
async fn python_client() -> PathBuf {
    const PACKAGE: &str = "queen-mq==1.3.0";
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let home = target.join("python-clients");
    let check = format!(
        "import queen, importlib.metadata as m; assert 'queen-mq==' + m.version('queen-mq') == '{PACKAGE}'"
    );
    let works = async || run(Command::new(home.join("bin/python")).args(["-c", &check])).await.is_ok();
    if works().await {
        return home.join("bin/python");
    }
    // Made beside it and renamed when complete: nobody ever sees half of it.
    let draft = target.join(format!("python-clients-{}", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir_all(&target).unwrap();
    let mut venv = Command::new("python3");
    if let Err(output) = run(venv.args(["-m", "venv"]).arg(&draft)).await {
        let _ = std::fs::remove_dir_all(&draft);
        panic!(
            "this test needs Python 3 with venv and pip (apt-get install python3-venv): {}",
            last_line(&output)
        );
    }
    let mut pip = Command::new(draft.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]);
    if let Err(output) = run(&mut pip).await {
        let _ = std::fs::remove_dir_all(&draft);
        panic!("this test needs {PACKAGE} from PyPI: {}", last_line(&output));
    }
    // What is there may be broken, or just have been completed by another process.
    if !works().await {
        let _ = std::fs::remove_dir_all(&home);
        let _ = std::fs::rename(&draft, &home);
    }
    let _ = std::fs::remove_dir_all(&draft);
    assert!(works().await, "{} is no working environment with {PACKAGE}", home.display());
    home.join("bin/python")
}

fn last_line(output: &str) -> &str {
    output.trim_end().lines().last().unwrap_or_default()
}

/// What a client's connection pool relies on: a connection serves the next request, or says that it will not.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_refused_batch_the_connection_serves_on_or_is_announced_to_close() {
    let world = World::new().await;
    let acme = world.tenant("acme").await;
    block_pushes(&world, &acme).await;
    let request = |body: &str| {
        let length = body.len();
        format!("POST /api/v1/kv HTTP/1.1\r\n{}Content-Length: {length}\r\n\r\n{body}", acme.headers())
    };
    let read = request(r#"[{"op":"get","ns":"rust","key":"k"}]"#);
    let grow = request(r#"[{"op":"put","ns":"rust","key":"k","value":1,"forever":true}]"#);
    let mut socket = Socket::open(world.port()).await;
    for at in 0..30 {
        let (request, status) = if at % 3 == 0 { (&read, 200) } else { (&grow, 403) };
        socket.send(request).await;
        let Some(answer) = socket.answer().await else {
            panic!("request {at}: the connection ended, though the answer before did not say so")
        };
        assert_eq!(answer.status, status, "request {at}: {answer:?}");
        if answer.header("connection").is_some_and(|option| option.eq_ignore_ascii_case("close")) {
            socket = Socket::open(world.port()).await;
        }
    }
}
