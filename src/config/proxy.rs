//! The proxy's settings (proxy contract §17; where we differ is said at the field).

use super::source::{ConfigError, Shown, Source};
use crate::{
    domain::{secret::Secret, session::LONGEST_SESSION_S, slug::Slug},
    gateway::{
        access_log::{AccessLogSettings, Place},
        client::{
            ConnectionCaps,
            tls::{Pair, TlsFiles},
        },
        spans::{self, SpanSettings},
    },
    identity::session::{KeyMaterial, SessionKeys},
    limits,
    policy::host::canonical_host,
    portal::auth::{AuthSettings, PortalLink, SessionCookies},
    telemetry::log::LogSettings,
};
use ipnet::IpNet;
use rustls_pki_types::{CertificateDer, pem::PemObject};
use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};
use uuid::Uuid;

/// Settings of `queen-proxy serve`.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is one switch of its own
pub struct ProxyConfig {
    /// Address and port of the tenant listener.
    pub bind: (IpAddr, u16),
    /// The admin listener's; none: there is none.
    pub admin: Option<SocketAddr>,
    /// Worker threads of the gateway.
    pub worker_threads: usize,
    /// The control plane's database; none only together with [`Self::dev_cell`].
    pub pxdb: Option<PxdbConfig>,
    /// Whether plan caps refuse, or only count (D1).
    pub enforce: bool,
    /// Where rates and places of waiting pops are counted together with other proxies; none: each for itself.
    pub shared_limits: Option<limits::shared::Settings>,
    /// Treat every request as a key with all scopes. For development.
    pub dev_insecure: bool,
    /// Serve one synthetic cluster from this cell for every host, without a control plane.
    pub dev_cell: Option<DevCell>,
    /// The cluster of hosts that name none.
    pub default_cluster: Option<Slug>,
    /// Whether `x-queen-tenant` is set upstream.
    pub tenant_header: bool,
    /// Bytes of a body that is read before it is forwarded.
    pub max_body_bytes: usize,
    /// Bytes of all such bodies together.
    pub buffer_bytes: u64,
    /// Peers whose `X-Forwarded-*` count.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether trusted proxies begin each connection with a header of the PROXY protocol.
    pub proxy_protocol: bool,
    /// TLS towards clients; none: there is none.
    pub tls: Option<TlsFiles>,
    /// Connections that clients may have.
    pub connections: ConnectionCaps,
    /// Timeouts towards clients and cells.
    pub timeouts: Timeouts,
    /// The caches in front of the control plane.
    pub cache: CacheConfig,
    /// How often `last_used_at` of keys is written.
    pub key_touch: Duration,
    /// The caps of plans, and what they are counted by.
    pub caps: CapsConfig,
    /// Hosts on which the credential names the cluster, canonical and in lower case.
    pub shared_hosts: HashSet<String>,
    /// Sessions.
    pub sessions: SessionConfig,
    /// Usage.
    pub metering: MeteringConfig,
    /// The log.
    pub log: LogSettings,
    /// The log of requests; none: there is none.
    pub access_log: Option<AccessLogSettings>,
    /// Where spans of requests go.
    pub spans: Option<SpanSettings>,
    /// Clusters that have metrics of their own.
    pub metrics_clusters: usize,
    /// Variables that look like settings of ours and are none.
    pub unknown_variables: Vec<String>,
}

/// Counting what tenants use.
#[derive(Clone, Debug)]
pub struct MeteringConfig {
    /// How often usage is written. A crash loses what was counted since.
    pub flush_every: Duration,
    /// Folder for usage that is not written yet; each proxy needs one of its own.
    pub spool_dir: PathBuf,
    /// Most bytes there, or in memory while the disk does not take them.
    pub spool_max_bytes: u64,
    /// How often days are summed up and monthly quotas are checked.
    pub rollup_every: Duration,
    /// Days that minutes are kept.
    pub keep_days: i32,
    /// Percent of the monthly quota at which a warning is due.
    pub warn_percent: i32,
}

/// Sessions of people.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// What signs and verifies tokens.
    pub keys: KeyMaterial,
    /// Signing in and out.
    pub auth: AuthSettings,
    /// Whether operators are live on this cell.
    pub operators: bool,
    /// Whether a session is refused while its revocation cannot be ruled out.
    pub revocation_strict: bool,
    /// How often the deny-list is swept; zero is never.
    pub revocation_sweep: Duration,
}

/// The control plane's PostgreSQL.
#[derive(Clone, Debug)]
pub struct PxdbConfig {
    /// Host name or address, or the folder of a Unix socket.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Role.
    pub user: String,
    /// Its password.
    pub password: Option<Secret>,
    /// Database.
    pub database: String,
    /// Whether to use TLS.
    pub ssl: bool,
    /// Whether the server's certificate and name must be right.
    pub ssl_verify: bool,
    /// Root certificates (PEM) in place of the built-in ones.
    pub ssl_root_cert: Option<String>,
    /// Pooled connections; the listener's is one more.
    pub pool_size: u32,
    /// Longest wait for a connection and for an answer.
    pub timeout: Duration,
}

impl PxdbConfig {
    /// Server, database and role, for messages.
    pub fn place(&self) -> String {
        format!("{}:{}, database {}, role {}", self.host, self.port, self.database, self.user)
    }
}

/// The one cell of a proxy without a control plane.
#[derive(Clone, Debug)]
pub struct DevCell {
    /// `base_url`.
    pub url: String,
    /// Its secret.
    pub token: Option<Secret>,
    /// `x-queen-tenant`.
    pub tenant: Uuid,
}

/// How long things may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeouts {
    /// From the request to the cell's response headers, unless it is a long poll.
    pub upstream: Duration,
    /// To open a connection to the cell.
    pub connect: Duration,
    /// Longest wait a long poll may ask for.
    pub longpoll_max: Duration,
    /// Added to what a long poll asked for.
    pub longpoll_margin: Duration,
    /// Idle upstream connections are let go after this; cells close theirs after 8 s and more.
    pub upstream_idle: Duration,
    /// Idle client connections are closed after this.
    pub keepalive: Duration,
    /// For a whole request head, from its first byte.
    pub head: Duration,
    /// Longest silence while a client sends its body.
    pub client_read: Duration,
    /// Longest time for a whole body that is read before it is forwarded.
    pub body: Duration,
    /// At shutdown, how long requests are still taken as ever, although the proxy is not ready any more.
    pub delay: Duration,
    /// Longest wait for running requests after that.
    pub drain: Duration,
}

/// Bounds of the caches.
#[derive(Clone, Copy, Debug)]
pub struct CacheConfig {
    /// How long an entry counts as fresh.
    pub ttl: Duration,
    /// How long "there is no such thing" is remembered.
    pub negative_ttl: Duration,
    /// How long past its freshness an entry may serve while the database is silent; 0 is never.
    pub stale_grace: Duration,
    /// How long a request waits for a refresh when an older answer could serve it.
    pub refresh_wait: Duration,
    /// Entries per cache.
    pub max_entries: usize,
    /// Remembered absences per cache.
    pub max_negatives: usize,
}

/// The caps of plans (proxy contract §9, §14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CapsConfig {
    /// How often every cluster's cell is asked what it keeps, the first time at once.
    pub reconcile_every: Duration,
    /// How often admitted queues are written to pxdb.
    pub persist_every: Duration,
    /// How often a cluster whose pushes are blocked for storage is asked for, and its cap read again, so
    /// that it need not wait for the next round. What a cell tells counts at once.
    pub storage_refresh: Duration,
    /// How long a queue may be missing in a listing before it is taken for deleted.
    pub settle: Duration,
    /// Listings asked for at once; each may take 16 MiB while it is read.
    pub polls: usize,
    /// Of these, at one cell.
    pub cell_polls: usize,
    /// Whether cells are told the tenant, as [`ProxyConfig::tenant_header`] says.
    pub tenant_header: bool,
    /// Waiting pops of one cell.
    pub cell_max_parked: u64,
    /// Items of a push on a plan without a cap of its own.
    pub max_batch_items: u64,
    /// Clusters that are counted and asked for.
    pub max_clusters: usize,
    /// Queues, and partition names, kept of one cluster.
    pub max_names: usize,
    /// Queue rows that may wait to be written.
    pub max_pending_rows: usize,
}

impl CapsConfig {
    /// What the counters keep to.
    pub fn counters(&self) -> limits::Settings {
        limits::Settings {
            max_clusters: self.max_clusters,
            max_names: self.max_names,
            max_pending_rows: self.max_pending_rows,
            max_cell_parked: self.cell_max_parked,
            max_batch_items: self.max_batch_items,
            settle: u64::try_from(self.settle.as_nanos()).unwrap_or(u64::MAX),
            ..limits::Settings::default()
        }
    }

    /// How often it is looked which clusters are to be asked for.
    pub fn turn(&self) -> Duration {
        self.reconcile_every.min(self.storage_refresh)
    }
}

const PREFIX: &str = "QUEEN_PROXY_";
/// 30 days: no timeout needs more, and sums stay far from overflow.
const LONGEST_MS: u64 = 30 * 24 * 3600 * 1000;
/// Between flushes everything is in memory.
const LONGEST_FLUSH_MS: u64 = 60_000;

impl ProxyConfig {
    /// Reads the settings and what `check` prints of them.
    pub fn load(
        environment: impl IntoIterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Result<(Self, Vec<Shown>), ConfigError> {
        let mut s = Source::new(PREFIX, environment, file);
        let mut config = Self {
            bind: bind(&mut s),
            admin: admin(&mut s),
            worker_threads: s.number("QUEEN_PROXY_WORKER_THREADS", cores(), 1..=1024),
            pxdb: pxdb(&mut s),
            enforce: s.flag("QUEEN_PROXY_ENFORCE", true),
            shared_limits: shared_limits(&mut s),
            dev_insecure: s.flag("QUEEN_PROXY_DEV_INSECURE", false),
            dev_cell: dev_cell(&mut s),
            default_cluster: s.parsed("QUEEN_PROXY_DEFAULT_CLUSTER", "a cluster slug", Slug::parse),
            tenant_header: s.flag("QUEEN_PROXY_TENANT_HEADER", true),
            max_body_bytes: s.number("QUEEN_PROXY_MAX_BODY_BYTES", 16 << 20, 1..=1 << 30),
            buffer_bytes: s.number("QUEEN_PROXY_BUFFER_BYTES", 256 << 20, 1 << 20..=1 << 40),
            trusted_proxies: s
                .parsed(
                    "QUEEN_PROXY_TRUSTED_PROXIES",
                    "a comma-separated list of addresses or CIDRs",
                    networks,
                )
                .unwrap_or_default(),
            proxy_protocol: s.flag("QUEEN_PROXY_PROXY_PROTOCOL", false),
            tls: tls(&mut s),
            connections: ConnectionCaps {
                total: s.number("QUEEN_PROXY_MAX_CONNECTIONS", 20_000, 1..=10_000_000),
                per_address: s.number("QUEEN_PROXY_MAX_CONNECTIONS_PER_ADDRESS", 10_000, 1..=10_000_000),
            },
            timeouts: Timeouts {
                upstream: millis(&mut s, "QUEEN_PROXY_UPSTREAM_TIMEOUT_MS", 35_000, 1),
                connect: millis(&mut s, "QUEEN_PROXY_UPSTREAM_CONNECT_TIMEOUT_MS", 5_000, 1),
                longpoll_max: millis(&mut s, "QUEEN_PROXY_LONGPOLL_MAX_MS", 90_000, 1),
                longpoll_margin: millis(&mut s, "QUEEN_PROXY_LONGPOLL_MARGIN_MS", 10_000, 0),
                upstream_idle: millis(&mut s, "QUEEN_PROXY_UPSTREAM_IDLE_MS", 4_000, 1),
                keepalive: millis(&mut s, "QUEEN_PROXY_KEEPALIVE_MS", 75_000, 1_000),
                head: millis(&mut s, "QUEEN_PROXY_HEAD_TIMEOUT_MS", 10_000, 100),
                client_read: millis(&mut s, "QUEEN_PROXY_CLIENT_READ_TIMEOUT_MS", 30_000, 1),
                body: millis(&mut s, "QUEEN_PROXY_BODY_TIMEOUT_MS", 120_000, 1),
                delay: millis(&mut s, "QUEEN_PROXY_SHUTDOWN_DELAY_MS", 0, 0),
                drain: millis(&mut s, "QUEEN_PROXY_SHUTDOWN_DRAIN_MS", 5_000, 0),
            },
            cache: CacheConfig {
                ttl: millis(&mut s, "QUEEN_PROXY_CACHE_TTL_MS", 30_000, 1),
                negative_ttl: millis(&mut s, "QUEEN_PROXY_NEGATIVE_TTL_MS", 5_000, 0),
                stale_grace: millis(&mut s, "QUEEN_PROXY_STALE_GRACE_MS", 600_000, 0),
                refresh_wait: millis(&mut s, "QUEEN_PROXY_REFRESH_WAIT_MS", 250, 0),
                max_entries: s.number("QUEEN_PROXY_CACHE_MAX_ENTRIES", 200_000, 1..=100_000_000),
                max_negatives: s.number("QUEEN_PROXY_NEGATIVE_MAX_ENTRIES", 10_000, 0..=10_000_000),
            },
            key_touch: millis(&mut s, "QUEEN_PROXY_KEY_TOUCH_MS", 10_000, 1_000),
            caps: caps(&mut s),
            shared_hosts: s
                .parsed("QUEEN_PROXY_SHARED_HOSTS", "a comma-separated list of host names", shared_hosts)
                .unwrap_or_default(),
            sessions: sessions(&mut s),
            metering: metering(&mut s),
            log: super::logging(&mut s),
            access_log: access_log(&mut s),
            spans: spans(&mut s),
            metrics_clusters: s.number("QUEEN_PROXY_METRICS_CLUSTERS", 500, 0..=100_000),
            unknown_variables: Vec::new(),
        };
        config.caps.tenant_header = config.tenant_header;
        if config.pxdb.is_none() && !config.shared_hosts.is_empty() {
            s.refuse("QUEEN_PROXY_SHARED_HOSTS: needs a control plane (PXDB_HOST)");
        }
        if let Err(error) = SessionKeys::new(&config.sessions.keys) {
            s.refuse(error.to_string());
        }
        super::reserved::read(&mut s);
        config.unknown_variables = s.unknown_variables();
        if config.pxdb.is_none() && config.dev_cell.is_none() {
            s.refuse("PXDB_HOST: needed, unless QUEEN_PROXY_DEV_CELL_URL names the one cell to serve");
        }
        Ok((config, s.finish()?))
    }
}

fn bind(s: &mut Source) -> (IpAddr, u16) {
    let port = s.number("QUEEN_PROXY_PORT", 6711, 1..=u16::MAX);
    let text = s.text("QUEEN_PROXY_BIND_ADDR", "0.0.0.0", false);
    let address = text.parse().unwrap_or_else(|_| {
        s.refuse("QUEEN_PROXY_BIND_ADDR: must be an IP address without a port");
        IpAddr::from([0, 0, 0, 0])
    });
    (address, port)
}

fn tls(s: &mut Source) -> Option<TlsFiles> {
    let (chain, key) = (s.optional("QUEEN_PROXY_TLS_CERT"), s.optional("QUEEN_PROXY_TLS_KEY"));
    let files = match (chain, key) {
        (None, None) => return None,
        (Some(chain), Some(key)) => TlsFiles { chain: chain.into(), key: key.into() },
        (Some(_), None) => {
            s.refuse("QUEEN_PROXY_TLS_CERT: needs QUEEN_PROXY_TLS_KEY");
            return None;
        }
        (None, Some(_)) => {
            s.refuse("QUEEN_PROXY_TLS_KEY: needs QUEEN_PROXY_TLS_CERT");
            return None;
        }
    };
    if let Err(error) = Pair::load(&files) {
        s.refuse(format!("QUEEN_PROXY_TLS_CERT: {error}"));
    }
    Some(files)
}

fn admin(s: &mut Source) -> Option<SocketAddr> {
    const OFF: &str = "off";
    let text = s.text("QUEEN_PROXY_ADMIN_ADDR", "127.0.0.1:9711", false);
    if text == OFF {
        return None;
    }
    let address = text.parse().ok();
    if address.is_none() {
        s.refuse("QUEEN_PROXY_ADMIN_ADDR: must be an IP address with a port, or off");
    }
    address
}

fn access_log(s: &mut Source) -> Option<AccessLogSettings> {
    let one_in = s.number("QUEEN_PROXY_ACCESS_LOG_ONE_IN", 1, 1..=1_000_000);
    let place = match s.text("QUEEN_PROXY_ACCESS_LOG", "off", false).as_str() {
        "off" => return None,
        "stdout" => Place::Stdout,
        path => Place::File(path.into()),
    };
    Some(AccessLogSettings { place, one_in })
}

fn spans(s: &mut Source) -> Option<SpanSettings> {
    let what = "an address such as http://127.0.0.1:4318: a collector nearby, without TLS and credentials";
    let one_in = s.number("QUEEN_PROXY_OTLP_ONE_IN", 100, 1..=1_000_000);
    let endpoint = s.parsed("QUEEN_PROXY_OTLP_ENDPOINT", what, |text| {
        let url = url::Url::parse(text).ok()?;
        let plain = url.scheme() == "http" && url.username().is_empty() && url.password().is_none();
        (plain && url.query().is_none() && url.fragment().is_none()).then(|| url.to_string())
    })?;
    if !spans::BUILT_IN {
        s.refuse("QUEEN_PROXY_OTLP_ENDPOINT: this program was built without the feature opentelemetry");
    }
    Some(SpanSettings { endpoint, one_in })
}

fn pxdb(s: &mut Source) -> Option<PxdbConfig> {
    let host = s.optional("PXDB_HOST");
    let config = PxdbConfig {
        host: host.clone().unwrap_or_default(),
        port: s.number("PXDB_PORT", 5432, 1..=u16::MAX),
        user: s.text("PXDB_USER", "postgres", false),
        password: s.secret("PXDB_PASSWORD", "PXDB_PASSWORD_FILE"),
        database: s.text("PXDB_DB", "queen_proxy", false),
        ssl: s.flag("PXDB_USE_SSL", false),
        ssl_verify: s.flag("PXDB_SSL_REJECT_UNAUTHORIZED", true),
        ssl_root_cert: s.parsed(
            "PXDB_SSL_ROOT_CERT",
            "certificates in PEM form (the content, not a path)",
            |pem| are_certificates(pem).then(|| pem.to_owned()),
        ),
        pool_size: s.number("PXDB_POOL_SIZE", 16, 2..=1_000),
        timeout: millis(s, "PXDB_TIMEOUT_MS", 5_000, 100),
    };
    host.map(|_| config)
}

fn dev_cell(s: &mut Source) -> Option<DevCell> {
    let url = s.parsed("QUEEN_PROXY_DEV_CELL_URL", "an http:// URL without credentials", |url| {
        let uri: http::Uri = url.parse().ok()?;
        let authority = uri.authority()?;
        let plain = uri.scheme_str() == Some("http")
            && !authority.host().is_empty()
            && !authority.as_str().contains('@');
        plain.then(|| url.to_owned())
    });
    let token = s.secret("QUEEN_PROXY_DEV_CELL_TOKEN", "QUEEN_PROXY_DEV_CELL_TOKEN_FILE");
    let tenant = s
        .parsed("QUEEN_PROXY_DEV_TENANT", "a UUID", |text| Uuid::parse_str(text).ok())
        // The tenant that the cell falls back to as well.
        .unwrap_or(Uuid::from_u128(1));
    url.map(|url| DevCell { url, token, tenant })
}

/// At least one certificate, and nothing that is none.
fn are_certificates(pem: &str) -> bool {
    let mut certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
    certificates.next().is_some_and(|first| first.is_ok()) && certificates.all(|next| next.is_ok())
}

fn sessions(s: &mut Source) -> SessionConfig {
    let public_url = s.parsed("QUEEN_PROXY_PUBLIC_URL", "an http:// or https:// URL", web_url);
    let public_host = public_url.as_ref().and_then(|url| url.host_str()).map(str::to_owned);
    let secure = public_url.is_some_and(|url| url.scheme() == "https");
    let audience = s.optional("QUEEN_PROXY_JWT_AUD");
    let cookie_name = s.text("QUEEN_PROXY_COOKIE_NAME", "queen_session", false);
    if !cookie_name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.')) {
        s.refuse("QUEEN_PROXY_COOKIE_NAME: must be letters, digits, `_`, `-` and `.`");
    }
    SessionConfig {
        keys: KeyMaterial {
            issuer: s.text("QUEEN_PROXY_JWT_ISS", "queen-proxy", false),
            // The host that people see, unless another name is given.
            audience: audience.or(public_host),
            ed25519_private: s.secret("QUEEN_PROXY_JWT_ED25519_PEM", "QUEEN_PROXY_JWT_ED25519_PEM_FILE"),
            ed25519_public: s.optional("QUEEN_PROXY_JWT_ED25519_PUB_PEM"),
            ed25519_previous: s.optional("QUEEN_PROXY_JWT_ED25519_PUB_PEM_PREVIOUS"),
            hmac_secret: s.secret("QUEEN_PROXY_JWT_SECRET", "QUEEN_PROXY_JWT_SECRET_FILE"),
        },
        auth: auth(s, cookie_name, secure),
        operators: s.flag("QUEEN_PROXY_OPERATOR_ENABLED", false),
        revocation_strict: s.flag("QUEEN_PROXY_REVOCATION_STRICT", false),
        revocation_sweep: millis(s, "QUEEN_PROXY_REVOCATION_SWEEP_MS", 3_600_000, 0),
    }
}

fn auth(s: &mut Source, cookie_name: String, secure: bool) -> AuthSettings {
    let domain = s.parsed("QUEEN_PROXY_COOKIE_DOMAIN", "a domain name", |name| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
        name.bytes().all(plain).then(|| name.to_owned())
    });
    let url = s.parsed("QUEEN_PROXY_AUTH_PORTAL_URL", "an http:// or https:// URL", web_url);
    let label = s.text("QUEEN_PROXY_AUTH_PORTAL_LABEL", "Continue to the control plane", false);
    AuthSettings {
        ttl_s: s.number("QUEEN_PROXY_JWT_TTL_S", 86_400, 60..=LONGEST_SESSION_S),
        cookies: SessionCookies { name: cookie_name, domain, secure },
        portal: url.map(|url| PortalLink { url: url.into(), label }),
        workers: s.number("QUEEN_PROXY_LOGIN_WORKERS", 1, 1..=64),
        queue: s.number("QUEEN_PROXY_LOGIN_QUEUE", 64, 1..=10_000),
        attempts_per_address: s.number("QUEEN_PROXY_LOGIN_ATTEMPTS_PER_ADDRESS", 10, 1..=1_000_000),
        failures_per_account_and_address: s.number(
            "QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT_AND_ADDRESS",
            5,
            1..=1_000_000,
        ),
        failures_per_account: s.number("QUEEN_PROXY_LOGIN_FAILURES_PER_ACCOUNT", 100, 1..=1_000_000),
        max_tracked: s.number("QUEEN_PROXY_LOGIN_MAX_TRACKED", 50_000, 1..=10_000_000),
    }
}

fn metering(s: &mut Source) -> MeteringConfig {
    let flush_ms = s.number("QUEEN_PROXY_METER_FLUSH_MS", 15_000, 100..=LONGEST_FLUSH_MS);
    MeteringConfig {
        flush_every: Duration::from_millis(flush_ms),
        spool_dir: s.text("QUEEN_PROXY_SPOOL_DIR", "./queen-proxy-spool", false).into(),
        spool_max_bytes: s.number("QUEEN_PROXY_SPOOL_MAX_BYTES", 64 << 20, 1 << 16..=1 << 40),
        rollup_every: millis(s, "QUEEN_PROXY_ROLLUP_MS", 3_600_000, 1_000),
        keep_days: s.number("QUEEN_PROXY_USAGE_KEEP_DAYS", 90, 1..=36_500),
        warn_percent: s.number("QUEEN_PROXY_QUOTA_WARN_PERCENT", 80, 1..=100),
    }
}

fn web_url(text: &str) -> Option<url::Url> {
    url::Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https"))
}

fn caps(s: &mut Source) -> CapsConfig {
    CapsConfig {
        reconcile_every: millis(s, "QUEEN_PROXY_RECONCILE_MS", 60_000, 100),
        persist_every: millis(s, "QUEEN_PROXY_REGISTRY_PERSIST_MS", 1_000, 100),
        storage_refresh: millis(s, "QUEEN_PROXY_STORAGE_REFRESH_MS", 10_000, 500),
        settle: millis(s, "QUEEN_PROXY_QUEUE_SETTLE_MS", 120_000, 0),
        polls: s.number("QUEEN_PROXY_RECONCILE_CONCURRENCY", 16, 1..=1_000),
        cell_polls: s.number("QUEEN_PROXY_RECONCILE_CELL_CONCURRENCY", 4, 1..=1_000),
        tenant_header: true,
        cell_max_parked: s.number("QUEEN_PROXY_CELL_MAX_PARKED", 5_000, 0..=u64::MAX),
        max_batch_items: s.number("QUEEN_PROXY_MAX_BATCH_ITEMS", 10_000, 0..=u64::MAX),
        max_clusters: s.number("QUEEN_PROXY_CAPS_MAX_CLUSTERS", 100_000, 1..=10_000_000),
        max_names: s.number("QUEEN_PROXY_CAPS_MAX_NAMES", 100_000, 1..=10_000_000),
        max_pending_rows: s.number("QUEEN_PROXY_CAPS_MAX_PENDING_ROWS", 100_000, 1..=10_000_000),
    }
}

/// The URL may hold a password: what is shown of it is only where it leads to.
fn shared_limits(s: &mut Source) -> Option<limits::shared::Settings> {
    const LOCAL: &str = "local";
    let prefix = s.text("QUEEN_PROXY_LIMITS_PREFIX", "queen-proxy", false);
    s.masked(
        "QUEEN_PROXY_LIMITS",
        LOCAL,
        "local, or a redis:// or rediss:// URL: redis://[user:password@]host[:port][/database]",
        |text| {
            if text == LOCAL {
                return Some((None, LOCAL.to_owned()));
            }
            let settings = limits::shared::Settings::parse(text, prefix)?;
            let place = settings.place().to_owned();
            Some((Some(settings), place))
        },
    )
    .flatten()
}

fn shared_hosts(list: &str) -> Option<HashSet<String>> {
    let names = list.split(',').map(|host| canonical_host(host).to_ascii_lowercase());
    let names: HashSet<String> = names.filter(|name| !name.is_empty()).collect();
    let plain = |name: &String| {
        name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'))
    };
    (!names.is_empty() && names.iter().all(plain)).then_some(names)
}

fn networks(list: &str) -> Option<Vec<IpNet>> {
    list.split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .map(|entry| entry.parse().ok().or_else(|| entry.parse::<IpAddr>().ok().map(IpNet::from)))
        .collect()
}

fn millis(s: &mut Source, name: &'static str, default: u64, least: u64) -> Duration {
    Duration::from_millis(s.number(name, default, least..=LONGEST_MS))
}

/// What the machine, or the container's CPU quota, gives us.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
