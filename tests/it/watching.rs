//! What an operator sees of a running proxy: figures, dashboards, alerts, the status page, the access log.

mod browser;

use crate::support::{Redis, Socket, Tenant, World, ask_admin, eventually, free_port, promtool, sample};
use browser::Browser;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

const SOON: Duration = Duration::from_secs(20);

/// A proxy with an admin listener, beside a real cell.
struct Watched {
    world: World,
    tenant: Tenant,
}

impl Watched {
    async fn new(environment: &[(&str, &str)]) -> Self {
        let builder = World::builder()
            .admin()
            .cell_env("QUEEN_KV_QUOTA_REFRESH_MS", 1000)
            .cell_env("QUEEN_KV_USAGE_EVERY_MS", 1000);
        let world = environment.iter().fold(builder, |builder, (name, value)| builder.env(name, value));
        let world = world.start().await;
        let tenant = world.tenant("acme").await;
        Self { world, tenant }
    }

    async fn page(&self, path: &str) -> String {
        let answer = ask_admin(self.world.admin, path).await;
        assert_eq!(answer.status, 200, "{path}");
        String::from_utf8(answer.body).unwrap()
    }

    async fn put(&self, key: &str) -> u16 {
        let body = json!([{"op": "put", "ns": "ns", "key": key, "value": 1, "forever": true}]).to_string();
        self.world.ask("POST /api/v1/kv", &self.tenant.headers(), &body).await.status
    }

    /// Something of everything that is counted: good and refused requests, one over a limit, and a cell that
    /// cannot be reached.
    async fn traffic(&self) {
        for round in 0..5 {
            assert_eq!(self.put(&format!("k{round}")).await, 200);
        }
        let stranger = self.tenant.headers().replace(&self.tenant.key, "qk_live_nobody");
        assert_eq!(self.world.ask("GET /api/v1/kv/ns/k0", &stranger, "").await.status, 401);
        let closed = self.world.add_cell("closed", free_port()).await;
        let lost = self.world.tenant("lost").await;
        self.world
            .sql(&format!(
                "UPDATE queen_proxy.clusters SET cell_id = '{closed}' WHERE id = '{}'",
                lost.cluster
            ))
            .await;
        eventually("the other cell is known of", SOON, async || {
            (self.world.ask("GET /api/v1/kv/ns/k0", &lost.headers(), "").await.status == 502).then_some(())
        })
        .await;
        let limited = self.world.tenant("limited").await;
        self.world
            .sql(&format!(
                r#"UPDATE queen_proxy.clusters SET limit_overrides = '{{"max_req_per_sec": 1, "req_burst": 1}}'
                    WHERE id = '{}'"#,
                limited.cluster
            ))
            .await;
        eventually("the limit is known of", SOON, async || {
            (self.world.ask("GET /api/v1/kv/ns/k0", &limited.headers(), "").await.status == 429).then_some(())
        })
        .await;
    }
}

fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(project(folder)).unwrap();
    let files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    assert!(!files.is_empty(), "{folder}");
    files
}

/// Every expression in a JSON or YAML document, under whatever it stands.
fn expressions(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    if path.extension().is_some_and(|extension| extension == "json") {
        let mut found = Vec::new();
        collect(&serde_json::from_str(&text).unwrap(), &mut found);
        return found;
    }
    // Of a rule file everything but the texts for people.
    let people = ["summary:", "runbook:", "#"];
    let lines = text.lines().filter(|line| !people.iter().any(|word| line.trim_start().starts_with(word)));
    lines.map(str::to_owned).collect()
}

fn collect(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match member {
                    Value::String(text) if name == "expr" || name == "query" => found.push(text.clone()),
                    _ => collect(member, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
        _ => {}
    }
}

/// The names of metrics and of recorded sums in an expression.
fn names(expression: &str) -> impl Iterator<Item = &str> {
    let part = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | ':');
    let ours = ["queen_", "process_", "instance:", "cluster:"];
    expression
        .split(move |character| !part(character))
        .filter(move |word| ours.iter().any(|prefix| word.starts_with(prefix) && word.len() > prefix.len()))
}

#[tokio::test]
async fn dashboards_and_rules_name_what_there_is() {
    let redis = Redis::start().await;
    let store = redis.url();
    let environment = [
        ("QUEEN_PROXY_ACCESS_LOG", "stdout"),
        ("QUEEN_PROXY_RECONCILE_MS", "1000"),
        ("QUEEN_PROXY_LIMITS", store.as_str()),
    ];
    let watched = Watched::new(&environment).await;
    watched.traffic().await;
    // A tenant is measured when it has a quota.
    let at_cell: uuid::Uuid =
        sqlx::query_scalar("SELECT broker_tenant_uuid FROM queen_proxy.clusters WHERE id = $1")
            .bind(watched.tenant.cluster)
            .fetch_one(&mut watched.world.control().await)
            .await
            .unwrap();
    sqlx::query("INSERT INTO queen.kv_quota (tenant_id, enabled, max_rows) VALUES ($1, true, 1000)")
        .bind(at_cell)
        .execute(&mut watched.world.cell_database().await)
        .await
        .unwrap();
    let rules = files("conf/prometheus", "yml");
    let mut named: BTreeSet<String> = BTreeSet::new();
    for path in rules.iter().chain(&files("conf/grafana", "json")) {
        let expressions = expressions(path);
        named.extend(expressions.iter().flat_map(|expression| names(expression)).map(str::to_owned));
    }
    assert!(named.len() > 50, "{named:?}");
    for path in &rules {
        let text = fs::read_to_string(path).unwrap();
        let recorded = text.lines().filter_map(|line| line.trim().strip_prefix("- record: "));
        for name in recorded {
            named.remove(name);
        }
    }
    // Without TLS there is none; `tls.rs` sees it.
    assert!(named.remove("queen_proxy_tls_certificate_expiry_timestamp_seconds"));
    // Some have a sample only after the first round of something.
    let metrics = eventually("every metric that is named has a sample", SOON, async || {
        let metrics = watched.page("/metrics").await;
        let head = watched.world.cell_head("GET /metrics/prometheus", watched.tenant.tenant);
        let cell = Socket::open(watched.world.cell_port).await.ask(format!("{head}\r\n")).await;
        let all = metrics.clone() + std::str::from_utf8(&cell.body).unwrap();
        for line in all.lines().filter(|line| !line.starts_with('#')) {
            named.remove(line.split(['{', ' ']).next().unwrap());
        }
        named.is_empty().then_some(metrics)
    })
    .await;
    let (code, objections) = promtool(&["check", "metrics"], &metrics);
    assert_eq!(code, Some(0), "{objections}");
}

#[test]
fn promtool_takes_rules_and_scrape() {
    for path in files("conf/prometheus", "yml") {
        let path = path.to_str().unwrap();
        let kind = if path.ends_with(".rules.yml") { "rules" } else { "config" };
        // The secret's file is on the operator's machine.
        let arguments: &[&str] =
            if kind == "rules" { &["check", kind, path] } else { &["check", kind, "--syntax-only", path] };
        let (code, text) = promtool(arguments, "");
        assert_eq!(code, Some(0), "{text}");
    }
}

#[test]
fn every_alert_says_what_to_do() {
    let text = fs::read_to_string(project("conf/prometheus/alerts.rules.yml")).unwrap();
    let count = |word: &str| text.lines().filter(|line| line.trim_start().starts_with(word)).count();
    let alerts = count("- alert:");
    assert!(alerts >= 20, "{alerts}");
    assert_eq!(
        (count("summary:"), count("runbook:"), count("labels: {severity: ")),
        (alerts, alerts, alerts)
    );
}

#[tokio::test]
async fn figures_tell_what_happened() {
    let watched = Watched::new(&[("QUEEN_PROXY_METRICS_CLUSTERS", "1")]).await;
    watched.traffic().await;
    // A request is counted when its answer is through.
    let metrics = eventually("all of it is counted", SOON, async || {
        let metrics = watched.page("/metrics").await;
        let last = r#"queen_proxy_cluster_requests_total{cluster="_others",outcome="refused"} 1"#;
        metrics.contains(last).then_some(metrics)
    })
    .await;
    let figure = |series: &str| {
        let value = sample(&metrics, series);
        value.unwrap_or_else(|| panic!("{series} is not in\n{metrics}")).parse::<f64>().unwrap()
    };
    assert!(figure(r#"queen_proxy_cluster_requests_total{cluster="acme-prod",outcome="answered"}"#) >= 5.0);
    // No place was left for these.
    assert!(figure(r#"queen_proxy_cluster_requests_total{cluster="_others",outcome="failed"}"#) >= 1.0);
    assert!(figure(r#"queen_proxy_cluster_requests_total{cluster="_others",outcome="refused"}"#) >= 1.0);
    assert!(!metrics.contains("limited-prod"), "{metrics}");
    assert!(figure(r#"queen_proxy_upstream_errors_total{cause="connect_refused"}"#) >= 1.0);
    assert!(figure(r#"queen_proxy_cache_hits_total{cache="keys"}"#) >= 4.0);
    assert!(figure(r#"queen_proxy_cache_loads_total{cache="clusters"}"#) >= 1.0);
    assert!(figure("queen_proxy_pool_open_connections") >= 1.0);
    assert!(figure("queen_proxy_listener_last_event_timestamp_seconds") > 1.7e9);
    let kv = figure(r#"queen_proxy_request_duration_seconds_count{class="kv"}"#);
    assert!((figure(r#"queen_proxy_own_duration_seconds_count{class="kv"}"#) - kv).abs() < f64::EPSILON);

    let status: Value = serde_json::from_str(&watched.page("/status.json").await).unwrap();
    let clusters = status["clusters"].as_array().unwrap();
    let of = |name: &str| clusters.iter().find(|row| row["cluster"] == name).unwrap();
    assert_eq!((&of("acme-prod")["answered"], clusters.len()), (&json!(5), 2));
    assert!(of("_others")["failed"].as_u64().unwrap() >= 1);
    let codes: Vec<&str> =
        status["refusals"].as_array().unwrap().iter().map(|row| row["code"].as_str().unwrap()).collect();
    for code in ["unauthorized", "bad_gateway", "rate_limited"] {
        assert!(codes.contains(&code), "{codes:?}");
    }
    assert_eq!(status["control"]["listening"], true);
    assert_eq!(status["control"]["silent"], false);
    let secrets = [&watched.tenant.key, &watched.world.cell_secret];
    assert!(secrets.iter().all(|secret| !metrics.contains(*secret) && !status.to_string().contains(*secret)));
}

#[tokio::test]
async fn the_status_page_reads_well() {
    let watched = Watched::new(&[]).await;
    watched.traffic().await;
    let browser = Browser::start().await;
    for (width, dark) in [(1280, false), (390, false), (390, true)] {
        browser.show(&format!("http://127.0.0.1:{}/status", watched.world.admin), width, dark).await;
        eventually("the page is drawn", SOON, async || {
            let text = browser.run("return document.querySelector('#clusters').innerText").await;
            text.as_str().is_some_and(|text| text.contains("acme-prod")).then_some(())
        })
        .await;
        let text = browser.run("return document.body.innerText").await;
        let text = text.as_str().unwrap();
        for words in ["answered a second", "rate_limited", "bad_gateway", "clusters by id", "connected"] {
            assert!(text.contains(words), "{words} is not in\n{text}");
        }
        let charts = browser.run("return document.querySelectorAll('#charts svg path').length").await;
        assert_eq!(charts, 6);
        let [page, window] = ["document.documentElement.scrollWidth", "window.innerWidth"];
        let fits = browser.run(&format!("return {page} <= {window}")).await;
        assert_eq!(fits, true, "{width} pixels: the page is wider than the window");
        let smallest = browser
            .run("return Math.min(...[...document.querySelectorAll('td,th,p,span')].filter(e => e.innerText).map(e => parseFloat(getComputedStyle(e).fontSize)))")
            .await;
        assert!(smallest.as_f64().unwrap() >= 14.0, "{smallest}");
        // Text against its ground, by the contrast ratio of WCAG.
        let contrast = browser.run(browser::CONTRAST).await;
        assert!(contrast.as_f64().unwrap() >= 4.5, "dark {dark}: {contrast}");
        let ground = browser.run("return getComputedStyle(document.body).backgroundColor").await;
        assert_eq!(ground == "rgb(255, 255, 255)", !dark, "{ground}");
        browser.picture(&format!("status-{width}{}.png", if dark { "-dark" } else { "" })).await;
    }
    assert_eq!(browser.complaints().await, Vec::<String>::new());
    // It says when the proxy does not answer any more.
    drop(watched);
    eventually("the page says that its figures are old", SOON, async || {
        let text = browser.run("return document.querySelector('#state').innerText").await;
        text.as_str().is_some_and(|text| text.contains("no answer from the proxy")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_access_log_tells_of_requests_and_not_of_contents() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let environment =
        [("QUEEN_PROXY_ACCESS_LOG", path.to_str().unwrap()), ("QUEEN_PROXY_ACCESS_LOG_ONE_IN", "1000000")];
    let mut watched = Watched::new(&environment).await;
    // Of these good ones hardly any is logged.
    for _ in 0..20 {
        assert_eq!(watched.put("a-name-of-theirs").await, 200);
    }
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = format!("{}traceparent: {trace}\r\n", watched.tenant.headers());
    let wrong = json!([{"op": "nope", "ns": "ns", "key": "a-name-of-theirs"}]).to_string();
    let wrong_answer = watched.world.ask("POST /api/v1/kv", &headers, &wrong).await;
    assert_eq!(wrong_answer.status, 400);
    let id = wrong_answer.header("x-queen-request-id").unwrap().to_owned();
    let stranger = headers.replace(&watched.tenant.key, "qk_live_nobody");
    assert_eq!(watched.world.ask("GET /api/v1/kv/ns/a-name-of-theirs", &stranger, "").await.status, 401);
    let (_, process) = &mut watched.world.proxies[0];
    process.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(process.wait(SOON).unwrap().success());
    let log = fs::read_to_string(&path).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let line = lines.iter().find(|line| line["request_id"] == id.as_str()).unwrap();
    assert_eq!(line["status"], wrong_answer.status);
    assert_eq!(
        (&line["method"], &line["cluster"], &line["class"]),
        (&json!("POST"), &json!("acme-prod"), &json!("kv"))
    );
    assert!(
        line["principal"].as_str().unwrap().starts_with("key ") && line["cell_ms"].as_f64().unwrap() > 0.0
    );
    assert_eq!(line["trace_id"], &trace[3..35]);
    assert_eq!(line["client"], "127.0.0.1");
    let refused = lines.iter().find(|line| line["status"] == 401).unwrap();
    assert_eq!((&refused["code"], refused.get("principal")), (&json!("unauthorized"), None));
    assert!(lines.len() < 10, "{log}");
    for word in ["a-name-of-theirs", "qk_", "Bearer", &watched.world.cell_secret] {
        assert!(!log.contains(word), "{word}");
    }
}
