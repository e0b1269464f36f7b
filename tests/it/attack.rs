use crate::support::{Answer, Socket, Tenant, World, WorldBuilder};
use std::time::{Duration, Instant};
use uuid::Uuid;

const SECRET: &str = "the signing secret of the login tests";
const PASSWORD: &str = "correct horse battery staple";
const GET: &str = "GET /api/v1/kv/ns/k";
const CT: &str = "Content-Type: application/x-www-form-urlencoded\r\n";

fn world() -> WorldBuilder {
    World::builder().recorder().env("QUEEN_PROXY_JWT_SECRET", SECRET)
}
fn open() -> WorldBuilder {
    world().env("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 100_000).env("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT", 100_000)
}
async fn user(world: &World, t: &Tenant, email: &str, cost: i32, role: &str) -> Uuid {
    let mut c = world.control().await;
    let u = sqlx::query_scalar("SELECT queen_proxy.create_user($1,$2,public.crypt($3,public.gen_salt('bf',$4)),'local')")
        .bind(t.tenant).bind(email).bind(PASSWORD).bind(cost).fetch_one(&mut c).await.unwrap();
    sqlx::query("SELECT queen_proxy.grant_cluster_role($1,$2,$3)").bind(t.cluster).bind(email).bind(role).execute(&mut c).await.unwrap();
    u
}
fn form(f: &[(&str, &str)]) -> String {
    let mut s = url::form_urlencoded::Serializer::new(String::new());
    for (n, v) in f { s.append_pair(n, v); }
    s.finish()
}
async fn login(w: &World, extra: &str, email: &str, pw: &str) -> Answer {
    w.ask("POST /auth/login", &format!("Host: x\r\n{CT}{extra}"), &form(&[("email", email), ("password", pw)])).await
}
fn cookie(a: &Answer) -> String { a.header("set-cookie").unwrap_or_else(|| panic!("{a:?}")).split(';').next().unwrap().to_owned() }
fn set_cookies(a: &Answer) -> Vec<String> { a.headers.iter().filter(|h| h.0 == "set-cookie").map(|h| h.1.clone()).collect() }

#[tokio::test(flavor = "multi_thread")]
async fn sessions_and_cookies() {
    let w = open().start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 4, "admin").await;
    user(&w, &acme, "eve@acme.example", 4, "viewer").await;
    let host = acme.host();
    // 1. session-token renews itself, after logout
    let s = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let short = w.ask("GET /auth/session-token", &format!("Host: x\r\nCookie: {s}\r\n"), "").await.json()["token"].as_str().unwrap().to_owned();
    w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: {s}\r\n"), "").await;
    let mut t = short;
    for n in 0..3 {
        let a = w.ask("GET /auth/session-token", &format!("Host: x\r\nCookie: queen_session={t}\r\n"), "").await;
        println!("RENEW {n} after logout: {} ", a.status);
        if a.status != 200 { break; }
        t = a.json()["token"].as_str().unwrap().to_owned();
    }
    let d = w.ask(GET, &format!("Host: {host}\r\nAuthorization: Bearer {t}\r\n"), "").await;
    println!("RENEW data plane with third-generation token: {}", d.status);
    let d = w.ask("GET /auth/me", &format!("Host: {host}\r\nCookie: queen_session={t}\r\n"), "").await;
    println!("RENEW me with it: {} role {}", d.status, d.json()["role"]);

    // 2. origin without sec-fetch
    for extra in ["Origin: https://evil.example\r\n", "Origin: null\r\n", "Origin: http://other.q.example\r\nReferer: http://other.q.example/\r\n"] {
        let a = login(&w, extra, "eve@acme.example", PASSWORD).await;
        println!("LOGIN CSRF {extra:?}: {} cookie {}", a.status, a.header("set-cookie").is_some());
    }
    let s = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let a = w.ask("POST /api/v1/push", &format!("Host: {host}\r\nCookie: {s}\r\nOrigin: http://evil.q.example\r\nContent-Type: text/plain\r\n"), "{\"items\":[]}").await;
    println!("CSRF push with foreign Origin, no sec-fetch: {}", a.status);
    // 3. cross-site logout
    let a = w.ask("POST /auth/logout", &format!("Host: x\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n"), "").await;
    println!("LOGOUT CSRF cross-site navigation: {} {:?}", a.status, set_cookies(&a));
    // 4. tossing
    let eve = cookie(&login(&w, "", "eve@acme.example", PASSWORD).await);
    let eve_t = eve.split_once('=').unwrap().1;
    let me = w.ask("GET /auth/me", &format!("Host: x\r\nCookie: queen_session_cell={eve_t}; {s}\r\n"), "").await;
    println!("TOSS plain _cell beats session: {}", me.json()["email"]);
    let me = w.ask("GET /auth/me", &format!("Host: x\r\nCookie: queen_session_cell=junk; {s}\r\n"), "").await;
    println!("TOSS junk _cell: {} {}", me.status, String::from_utf8_lossy(&me.body));
    let a = w.ask("POST /auth/login", &format!("Host: x\r\n{CT}Cookie: queen_session_cell={eve_t}\r\n"), &form(&[("email", "ann@acme.example"), ("password", PASSWORD)])).await;
    println!("TOSS login while _cell present sets: {:?}", set_cookies(&a).iter().map(|c| c.split('=').next().unwrap().to_owned()).collect::<Vec<_>>());
    // 5. duplicate cookies at logout
    let (a1, b1) = (cookie(&login(&w, "", "ann@acme.example", PASSWORD).await), cookie(&login(&w, "", "ann@acme.example", PASSWORD).await));
    w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: {a1}; {b1}\r\n"), "").await;
    for (n, c) in [("first", &a1), ("second", &b1)] {
        println!("DUP logout {n}: {}", w.ask(GET, &format!("Host: {host}\r\nCookie: {c}\r\n"), "").await.status);
    }
    // 6. json headers
    let a = w.ask("GET /auth/me", &format!("Host: x\r\nCookie: {s}\r\n"), "").await;
    println!("JSON headers {:?}", a.headers);
    // 7. next
    for next in ["/.//evil.example", "/%09/evil.example", "/%5cevil.example", "/;@evil.example", "/ /evil.example", "/..//evil.example", "/a%0d%0aSet-Cookie:x=y", "/\u{2028}/x", "/#//evil", "/?://x", "/http:evil"] {
        let a = w.ask("POST /auth/login", &format!("Host: x\r\n{CT}"), &form(&[("email", "ann@acme.example"), ("password", PASSWORD), ("next", next)])).await;
        println!("NEXT {next:?} -> {} {:?}", a.status, a.header("location"));
    }
    let raw = w.ask("POST /auth/login", &format!("Host: x\r\n{CT}"), "email=ann%40acme.example&password=correct+horse+battery+staple&next=%2Fa%0D%0ASet-Cookie%3A+x%3Dy").await;
    println!("NEXT raw crlf {:?} {:?}", raw.header("location"), set_cookies(&raw).len());
    let x = w.ask("GET /auth/login?next=/%22%3E%3Cscript%3Ealert(1)%3C/script%3E{style}{content}", "Host: x\r\n", "").await;
    println!("XSS {}", String::from_utf8_lossy(&x.body).lines().find(|l| l.contains("hidden")).unwrap());
    println!("PAGE headers {:?}", x.headers);
    // 8. xff non ascii / key in cookie
    let a = w.ask("GET /auth/me", &format!("Host: {host}\r\nCookie: queen_session={}\r\n", acme.key), "").await;
    println!("KEY in cookie: {}", a.status);
}

#[tokio::test(flavor = "multi_thread")]
async fn lockout_and_activity() {
    let w = world().start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 10, "viewer").await;
    user(&w, &acme, "bob@acme.example", 10, "viewer").await;
    println!("ann signs in (owner): {}", login(&w, "", "ann@acme.example", PASSWORD).await.status);
    tokio::time::sleep(Duration::from_secs(12)).await;
    let _ = w;
}

#[tokio::test(flavor = "multi_thread")]
async fn activity_oracle_and_lockout() {
    let w = world().env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1").start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 10, "viewer").await;
    let from = |n: u8| format!("X-Forwarded-For: 192.0.2.{n}\r\n");
    println!("owner: {}", login(&w, &from(200), "ann@acme.example", PASSWORD).await.status);
    tokio::time::sleep(Duration::from_secs(12)).await;
    for (email, addr) in [("ann@acme.example", 1), ("nobody@acme.example", 2)] {
        for _ in 0..10 { login(&w, &from(addr), email, "wrong").await; }
        let a = login(&w, &from(addr + 100), email, "wrong").await;
        println!("ACTIVITY {email}: {} retry-after {:?}", a.status, a.header("retry-after"));
    }
    let a = login(&w, &from(201), "ann@acme.example", PASSWORD).await;
    println!("LOCKOUT owner with right password after 10 failures of ONE stranger address: {} {:?}", a.status, a.header("retry-after"));
    // non ascii XFF gives another bucket
    for _ in 0..10 { login(&w, &from(50), "z@z", "wrong").await; }
    println!("XFF own bucket: {}", login(&w, &from(50), "y@z", "wrong").await.status);
    let p = form(&[("email", "y@z"), ("password", "b")]);
    let mut req = b"POST /auth/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\nX-Forwarded-For: \xff, 192.0.2.50\r\n".to_vec();
    req.extend(format!("Content-Length: {}\r\n\r\n{p}", p.len()).bytes());
    println!("XFF with a non-ASCII byte before: {:?}", Socket::open(w.port()).await.ask(&req).await.status);
}

#[tokio::test(flavor = "multi_thread")]
async fn full_table_locks_everybody_out() {
    let w = world().env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1").env("QUEEN_PROXY_LOGIN_MAX_TRACKED", 200).env("QUEEN_PROXY_LOGIN_WORKERS", 2).start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    for n in 0..215u32 {
        let h = format!("X-Forwarded-For: 2001:db8:0:{n:x}::1\r\n");
        let a = w.ask("POST /auth/login", &format!("Host: x\r\nContent-Type: text/plain\r\n{h}"), "x").await;
        if n < 2 || n > 208 { println!("FULL flood {n}: {}", a.status); }
    }
    let a = login(&w, "X-Forwarded-For: 198.51.100.9\r\n", "ann@acme.example", PASSWORD).await;
    println!("FULL a fresh honest user: {} {:?}", a.status, a.header("retry-after"));
}

#[tokio::test(flavor = "multi_thread")]
async fn timing() {
    let w = open().start().await;
    let acme = w.tenant("acme").await;
    for (n, c) in [("c4", 4), ("c8", 8), ("c10", 10), ("c12", 12)] { user(&w, &acme, &format!("{n}@acme.example"), c, "viewer").await; }
    for email in ["nobody@acme.example", "c10@acme.example", "nobody2@acme.example", "c4@acme.example", "c8@acme.example", "c12@acme.example"] {
        let mut times = Vec::new();
        for _ in 0..7 { let t = Instant::now(); login(&w, "", email, "wrong").await; times.push(t.elapsed().as_millis()); }
        times.sort_unstable();
        println!("TIMING {email}: {times:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn framing() {
    let w = open().start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    let s = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let f = form(&[("email", "ann@acme.example"), ("password", PASSWORD)]);
    let tail = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    let smug = "GET /api/v1/kv/ns/smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
    let l = f.len();
    let chunked = format!("{:x}\r\n{f}\r\n0\r\n\r\n", f.len());
    let cases: Vec<(&str, String)> = vec![
        ("chunked form", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\n{chunked}{tail}")),
        ("chunked w/ trailers", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{f}\r\n0\r\nX: y\r\n\r\n{tail}", f.len())),
        ("chunked bad size", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\nzz\r\n{f}\r\n0\r\n\r\n{tail}")),
        ("chunk ext", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\n{:x};a=b\r\n{f}\r\n0\r\n\r\n{tail}", f.len())),
        ("bare LF chunk", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\n{:x}\n{f}\r\n0\r\n\r\n{tail}", f.len())),
        ("GET login with body", format!("GET /auth/login HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("HEAD login with body", format!("HEAD /auth/login HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("logout with body", format!("POST /auth/logout HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("logout chunked", format!("POST /auth/logout HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{smug}\r\n0\r\n\r\n{tail}", smug.len())),
        ("me with body", format!("GET /auth/me HTTP/1.1\r\nHost: x\r\nCookie: {s}\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("expect+form at once", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Expect: 100-continue\r\nContent-Length: {l}\r\n\r\n{f}{tail}")),
        ("expect nonsense", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Expect: foo\r\nContent-Length: {l}\r\n\r\n{f}{tail}")),
        ("expect GET body", format!("GET /auth/login HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("expect logout body", format!("POST /auth/logout HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("expect login too large", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Expect: 100-continue\r\nContent-Length: 20000\r\n\r\n{}{tail}", "a".repeat(20_000))),
        ("login too large", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 200000\r\n\r\n{}{tail}", "a".repeat(200_000))),
        ("login way too large", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 2000000\r\n\r\n{}{tail}", "a".repeat(2_000_000))),
        ("http/1.0 login", format!("POST /auth/login HTTP/1.0\r\nHost: x\r\n{CT}Content-Length: {l}\r\n\r\n{f}{tail}")),
        ("http/1.0 expect", format!("POST /auth/login HTTP/1.0\r\nHost: x\r\n{CT}Expect: 100-continue\r\nContent-Length: {l}\r\n\r\n{f}{tail}")),
        ("post no length", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}\r\n{tail}")),
        ("CL+TE", format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n{chunked}{tail}")),
        ("405 with body", format!("PUT /auth/login HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{smug}{tail}", smug.len())),
        ("absolute me", format!("GET http://{}/auth/me HTTP/1.1\r\nHost: y\r\nCookie: {s}\r\n\r\n{tail}", acme.host())),
        ("fragment", format!("GET /auth/me#x HTTP/1.1\r\nHost: y\r\nCookie: {s}\r\n\r\n{tail}")),
    ];
    for (name, bytes) in cases {
        let mut sock = Socket::open(w.port()).await;
        let t = Instant::now();
        sock.send(&bytes).await;
        let mut got = Vec::new();
        loop {
            let head = name.starts_with("HEAD") && got.is_empty();
            let a = tokio::time::timeout(Duration::from_secs(15), async { if head { sock.answer_to_head().await } else { sock.answer().await } }).await;
            match a {
                Ok(Some(a)) => { let b: String = String::from_utf8_lossy(&a.body).chars().take(60).collect(); got.push(format!("{} conn={:?} {b:?}", a.status, a.header("connection"))); if a.header("connection") == Some("close") {} if b.contains("shared_hosts") { break; } }
                Ok(None) => { got.push("END".into()); break; }
                Err(_) => { got.push("TIMEOUT".into()); break; }
            }
        }
        println!("FRAMING {name} ({:?}): {got:#?}", t.elapsed());
    }
    println!("SMUGGLED to cell: {:?}", w.recorder().take().iter().filter(|r| format!("{r:?}").contains("smuggled")).count());
    // half-sent & slow forms
    let mut sock = Socket::open(w.port()).await;
    let t = Instant::now();
    sock.send(format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 100\r\n\r\nemail=a")).await;
    let slow = async { let mut n = 0; loop { tokio::time::sleep(Duration::from_secs(1)).await; n += 1; if n > 30 { break } } };
    let a = tokio::select! { a = sock.answer() => a, () = slow => None };
    println!("SLOW half: {:?} {:?} ends {}", a.map(|a| (a.status, a.code())), t.elapsed(), sock.ends_within(Duration::from_secs(4)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn logs() {
    let w = open().start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    let reqs: Vec<Vec<u8>> = vec![
        b"GET /auth/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer LEAKME_HEAD_1\r\nBad Header: x\r\n\r\n".to_vec(),
        b"GET /auth/me HTTP/1.1\r\nHost: x\r\nCookie: queen_session=LEAKME_HEAD_2\r\nX: \x01\r\n\r\n".to_vec(),
        b"G@T /auth/me?token=LEAKME_HEAD_3 HTTP/9.9\r\nHost: x\r\n\r\n".to_vec(),
        format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\npassword=LEAKME_BODY_4\r\n\r\n").into_bytes(),
        format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Transfer-Encoding: chunked\r\n\r\n5\r\npassword=LEAKME_BODY_5\r\n0\r\n\r\n").into_bytes(),
        format!("POST /auth/logout HTTP/1.1\r\nHost: x\r\nCookie: queen_session=LEAKME_HEAD_6\r\nTransfer-Encoding: chunked\r\n\r\npassword=LEAKME_BODY_6\r\n\r\n").into_bytes(),
        format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 10\r\n\r\npassword=a&x=LEAKME_BODY_7 junk\r\n\r\n").into_bytes(),
        format!("POST /auth/login HTTP/1.1\r\nHost: x\r\nX-Y: {}\r\nCookie: queen_session=LEAKME_HEAD_8\r\n\r\n", "LEAKME".repeat(200_000)).into_bytes(),
    ];
    for r in reqs { let mut s = Socket::open(w.port()).await; s.send(&r).await; let a = tokio::time::timeout(Duration::from_secs(3), s.answer()).await; println!("LOG req -> {:?}", a.map(|a| a.map(|a| a.status))); }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let log = w.proxies[0].1.log();
    println!("LEAKS {:?}", log.lines().filter(|l| l.contains("LEAKME")).map(|l| l.chars().take(300).collect::<String>()).collect::<Vec<_>>());
    println!("LOGTAIL {}", log.lines().rev().take(12).collect::<Vec<_>>().join("\n"));
}

fn jwt(user: Uuid, jti: &str) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let c = serde_json::json!({"sub": user, "iss": "queen-proxy", "exp": now + 900, "jti": jti, "role": "viewer"});
    jsonwebtoken::encode(&jsonwebtoken::Header::new(jsonwebtoken::Algorithm::HS256), &c, &jsonwebtoken::EncodingKey::from_secret(SECRET.as_bytes()).unwrap()).unwrap()
}
fn rss(w: &World) -> String {
    // the proxy of this world listens on this port
    let out = std::process::Command::new("sh").arg("-c").arg(format!("for p in $(pgrep -x queen-proxy); do tr '\\0' '\\n' < /proc/$p/environ 2>/dev/null | grep -q '^QUEEN_PROXY_PORT={}$' && grep -E 'VmRSS' /proc/$p/status; done", w.port())).output().unwrap();
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn b_me_starves_the_pool() {
    let w = open().env("PXDB_TIMEOUT_MS", 5000).start().await;
    let acme = w.tenant("acme").await;
    let globex = w.tenant("globex").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    let s = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let t = Instant::now();
    for _ in 0..20 { w.ask("GET /auth/me", &format!("Host: x\r\nCookie: {s}\r\n"), "").await; }
    println!("ME few clusters: {:?} each", t.elapsed() / 20);
    w.sql(&format!("INSERT INTO queen_proxy.clusters (tenant_id, cell_id, plan_id, slug) SELECT '{}', '{}', (SELECT id FROM queen_proxy.plans WHERE code='pro'), 'bulk-'||n FROM generate_series(1,100000) n; ANALYZE queen_proxy.clusters", globex.tenant, w.cell_id)).await;
    let t = Instant::now();
    for _ in 0..20 { w.ask("GET /auth/me", &format!("Host: x\r\nCookie: {s}\r\n"), "").await; }
    println!("ME 20000 clusters of others, ordinary user with one role: {:?} each", t.elapsed() / 20);
    let mut c = w.control().await;
    let (u,): (Uuid,) = sqlx::query_as("SELECT id FROM queen_proxy.users WHERE email='ann@acme.example'").fetch_one(&mut c).await.unwrap();
    let sql = format!("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {}", include_str!("../../src/control/sql/account.sql").replace("$1", &format!("'{u}'")).replace("$2", "true"));
    let plan: Vec<(String,)> = sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_all(&mut c).await.unwrap();
    for (l,) in plan.into_iter().filter(|l| l.0.contains("Time")||l.0.contains("Seq")) { println!("PLAN {l}"); }
    for (name, path, host) in [("cached", GET, acme.host()), ("me", "GET /auth/me", "x".to_owned())] {
    println!("--- flood of {name}");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let flood = futures_util::future::join_all((0..64).map(|_| async {
        let mut n = 0; let mut bad = 0;
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            let a = w.ask(path, &format!("Host: {host}\r\nCookie: {s}\r\n"), "").await; n += 1; if a.status != 200 { bad += 1; }
        } (n, bad) }));
    let victim = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        for n in 0..5 {
            let t = Instant::now();
            let (_, key) = w.key(globex.cluster, &["read"]).await;
            let k = t.elapsed();
            let t = Instant::now();
            let a = w.ask(GET, &format!("Host: {}\r\nAuthorization: Bearer {key}\r\n", globex.host()), "").await;
            println!("VICTIM new key {n} (issue {k:?}): {} {:?} {}", a.status, t.elapsed(), String::from_utf8_lossy(&a.body));
        }
        let t = Instant::now();
        let a = login(&w, "", "ann@acme.example", PASSWORD).await;
        println!("VICTIM login: {} {:?}", a.status, t.elapsed());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let (f, ()) = tokio::join!(flood, victim);
    println!("FLOOD {name} answers {} not-200 {}", f.iter().map(|x| x.0).sum::<i32>(), f.iter().map(|x| x.1).sum::<i32>());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b_denylist_full() {
    let w = open().proxies(2).relay().env("PXDB_TIMEOUT_MS", 1500).start().await;
    let acme = w.tenant("acme").await;
    let globex = w.tenant("globex").await;
    let eve = user(&w, &globex, "eve@globex.example", 4, "viewer").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    // What eve can do by herself, and how fast: mint and log out.
    let s = cookie(&login(&w, "", "eve@globex.example", PASSWORD).await);
    let t = Instant::now();
    futures_util::future::join_all((0..16).map(|_| async { for _ in 0..20 {
        let a = w.ask("GET /auth/session-token", &format!("Host: x\r\nCookie: {s}\r\n"), "").await;
        let tok = a.json()["token"].as_str().unwrap().to_owned();
        let a = w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: queen_session={tok}\r\n"), "").await; assert_eq!(a.status, 200);
    }})).await;
    println!("DENY 320 mint+logout in {:?}, never throttled", t.elapsed());
    let ann = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let asked = async |p: usize| w.ask_proxy(p, GET, &format!("Host: {}\r\nCookie: {ann}\r\n", acme.host()), "").await.status;
    println!("DENY before: {} {}", asked(0).await, asked(1).await);
    let before = rss(&w);
    w.sql(&format!("DO $$ BEGIN FOR n IN 1..100000 LOOP PERFORM queen_proxy.revoke_session(gen_random_uuid()::text, now() + interval '15 minutes', 'user', '{eve}'); END LOOP; END $$")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    println!("DENY 100000 revoked, rss {before} -> {}", rss(&w));
    println!("DENY ann again: {} {}", asked(0).await, asked(1).await);
    w.relay().fall_silent();
    let a = w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: {ann}\r\n"), "").await;
    println!("DENY logout in an outage with a full list: {}; afterwards the session on the same proxy: {}", a.status, asked(0).await);
    w.relay().speak();
    for n in 0..4 { tokio::time::sleep(Duration::from_secs(4)).await; let r = (asked(0).await, asked(1).await); println!("DENY {}s after recovery {r:?}", n * 4 + 4); if r == (401, 401) { break; } }
}

#[tokio::test(flavor = "multi_thread")]
async fn b_revoking_permits() {
    let w = open().proxies(2).relay().env("PXDB_TIMEOUT_MS", 300).start().await;
    let acme = w.tenant("acme").await;
    let globex = w.tenant("globex").await;
    let eve = user(&w, &globex, "eve@globex.example", 4, "viewer").await;
    user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    let ann = cookie(&login(&w, "", "ann@acme.example", PASSWORD).await);
    let asked = async |p: usize| w.ask_proxy(p, GET, &format!("Host: {}\r\nCookie: {ann}\r\n", acme.host()), "").await.status;
    println!("PERMITS before {} {}", asked(0).await, asked(1).await);
    w.relay().fall_silent();
    // eve's tokens, minted before the outage, three to a request
    let toks: Vec<String> = (0..1100).map(|n| jwt(eve, &format!("eve-{n}"))).collect();
    let t = Instant::now();
    let rs = futures_util::future::join_all(toks.chunks(1).map(|c| { let w = &w; async move {
        w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: queen_session={}\r\n", c[0]), "").await.status } })).await;
    println!("PERMITS 1100 logouts of eve: {} x 200 in {:?}", rs.iter().filter(|s| **s == 200).count(), t.elapsed());
    let a = w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: {ann}\r\n"), "").await;
    println!("PERMITS ann logs out: {} ; here {}", a.status, asked(0).await);
    w.relay().speak();
    tokio::time::sleep(Duration::from_secs(75)).await;
    println!("PERMITS 75 s after recovery: proxy0 {} proxy1 {}", asked(0).await, asked(1).await);
    let n: i64 = sqlx::query_scalar("SELECT count(*) FROM queen_proxy.revoked_tokens").fetch_one(&mut w.control().await).await.unwrap();
    println!("PERMITS rows in the table {n}; log: {:?}", w.proxies[0].1.log().lines().filter(|l| l.contains("this proxy only")).count());
}

#[tokio::test(flavor = "multi_thread")]
async fn b_login_queue_and_slow_forms() {
    let w = world().env("QUEEN_PROXY_TRUSTED_PROXIES", "127.0.0.1").start().await;
    let acme = w.tenant("acme").await;
    user(&w, &acme, "ann@acme.example", 10, "viewer").await;
    let flood = futures_util::future::join_all((0..100u8).map(|n| { let w = &w; async move { login(w, &format!("X-Forwarded-For: 192.0.2.{}\r\n", n / 10), &format!("n{n}@x"), "w").await.status } }));
    let honest = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let mut out = Vec::new();
        let t = Instant::now();
        for _ in 0..12 { let a = login(&w, "X-Forwarded-For: 198.51.100.1\r\n", "ann@acme.example", PASSWORD).await; out.push((a.status, t.elapsed().as_millis())); if a.status == 303 || a.status == 429 { break; } tokio::time::sleep(Duration::from_secs(1)).await; }
        println!("QUEUE honest user during a flood of 10 addresses: {out:?}");
    };
    let (f, ()) = tokio::join!(flood, honest);
    println!("QUEUE flood: 503 {} 401 {}", f.iter().filter(|s| **s == 503).count(), f.iter().filter(|s| **s == 401).count());
    // ip:port
    let mut got = Vec::new();
    for n in 0..12 { got.push(login(&w, &format!("X-Forwarded-For: 203.0.113.{n}:4711\r\n"), &format!("p{n}@x"), "w").await.status); }
    println!("XFF ip:port from 12 different clients: {got:?}");
    // slow forms
    let before = rss(&w);
    let mut socks = Vec::new();
    for _ in 0..800 { let mut s = Socket::open(w.port()).await; s.send(format!("POST /auth/login HTTP/1.1\r\nHost: x\r\n{CT}Content-Length: 16384\r\n\r\n{}", "a".repeat(16_000))).await; socks.push(s); }
    tokio::time::sleep(Duration::from_secs(2)).await;
    println!("SLOW 800 half forms of 16 KB: {before} -> {}", rss(&w));
    let t = Instant::now();
    let a = w.ask(GET, &acme.headers(), "").await;
    println!("SLOW tenant meanwhile {} {:?}", a.status, t.elapsed());
    tokio::time::sleep(Duration::from_secs(13)).await;
    println!("SLOW after 15 s: {}", rss(&w));
}

#[tokio::test(flavor = "multi_thread")]
async fn b_adopt() {
    use ed25519_dalek::{SigningKey, pkcs8::{EncodePrivateKey, EncodePublicKey, spki::der::pem::LineEnding}};
    let key = SigningKey::from_bytes(&[7; 32]);
    let public = key.verifying_key().to_public_key_pem(LineEnding::LF).unwrap();
    let w = World::builder().recorder().env("QUEEN_PROXY_JWT_ED25519_PUB_PEM", public).start().await;
    let acme = w.tenant("acme").await;
    let ann = user(&w, &acme, "ann@acme.example", 4, "viewer").await;
    let eve = user(&w, &acme, "eve@acme.example", 4, "viewer").await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let tok = |u: Uuid, jti: &str, exp: u64| { let c = serde_json::json!({"sub": u, "iss": "queen-proxy", "exp": exp, "jti": jti, "role": "viewer"});
        jsonwebtoken::encode(&jsonwebtoken::Header::new(jsonwebtoken::Algorithm::EdDSA), &c, &jsonwebtoken::EncodingKey::from_ed_der(key.to_pkcs8_der().unwrap().as_bytes())).unwrap() };
    let (a, e) = (tok(ann, "a", now + 600), tok(eve, "e", now + 600));
    let r = w.ask(&format!("GET /auth/session-token?token={e}"), &format!("Host: x\r\nCookie: queen_session={a}\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: image\r\n"), "").await;
    println!("ADOPT eve's token over ann's session, as an image: {} {:?}", r.status, set_cookies(&r).iter().map(|c| c.split('=').next().unwrap().to_owned()).collect::<Vec<_>>());
    let me = w.ask("GET /auth/me", &format!("Host: x\r\nCookie: queen_session={a}; queen_session_cell={e}\r\n"), "").await;
    println!("ADOPT then me is {}", me.json()["email"]);
    // far expiry
    for (n, exp) in [("far", 20_000_000_000_000u64), ("max", u64::MAX)] {
        let t = tok(ann, n, exp);
        let r = w.ask(&format!("GET /auth/session-token?token={t}"), "Host: x\r\n", "").await;
        let o = w.ask("POST /auth/logout", &format!("Host: x\r\nCookie: queen_session={t}\r\n"), "").await;
        println!("FAR {n}: adopt {} {:?} logout {}", r.status, r.header("set-cookie").map(|s| s.split("Max-Age").nth(1).unwrap().to_owned()), o.status);
    }
    println!("FAR log {:?}", w.proxies[0].1.log().lines().filter(|l| l.contains("only")).collect::<Vec<_>>());
}
