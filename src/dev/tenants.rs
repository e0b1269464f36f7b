//! The two demo tenants of `queen-proxy dev`.

use super::{CONTROL_DB, DevError, Server};
use crate::{config::proxy::ProxyConfig, control::migrate::migrate, domain::secret::Secret, identity};
use sqlx::PgConnection;
use std::{
    fs::{self, OpenOptions},
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};
use uuid::Uuid;

const TENANTS: [(&str, &str, &str); 2] =
    [("acme", "Acme Inc", "acme-prod"), ("globex", "Globex Corp", "globex-prod")];
const KEYS_FILE: &str = "keys.json";
/// The password of each tenant's admin. Everything here listens on loopback alone.
const PASSWORD: &str = "devpass";

/// The keys of the demo tenants, in the order of [`TENANTS`], and how to reach their control plane.
pub(super) struct Demo {
    keys: Vec<Secret>,
    psql: String,
}

/// Brings schema, cell row, tenants and keys into being, or finds them again.
pub(super) async fn prepare(
    config: &ProxyConfig,
    server: &Server,
    cell_port: u16,
    cell_secret: &Secret,
    folder: &Path,
    ephemeral: bool,
) -> Result<Demo, DevError> {
    if let Some(pxdb) = &config.pxdb {
        migrate(pxdb).await.map_err(|error| DevError::Database(error.to_string()))?;
    }
    let mut connection = server.connect(CONTROL_DB).await?;
    let cell: Uuid = sqlx::query_scalar(
        "INSERT INTO queen_proxy.cells (slug, region, base_url, class, cell_secret)
              VALUES ('dev-local', 'local', $1, 'shared', $2)
         ON CONFLICT (slug) DO UPDATE SET base_url = excluded.base_url, cell_secret = excluded.cell_secret
           RETURNING id",
    )
    .bind(format!("http://127.0.0.1:{cell_port}"))
    .bind(cell_secret.expose())
    .fetch_one(&mut connection)
    .await?;

    let kept = kept_keys(folder);
    let mut keys = Vec::new();
    for (at, (tenant, name, cluster)) in TENANTS.into_iter().enumerate() {
        let (cluster_id, new): (Uuid, Option<String>) = sqlx::query_as(
            "SELECT (made ->> 'cluster_id')::uuid, made ->> 'api_key'
               FROM queen_proxy.bootstrap_tenant($1, $2, $3, 'dev', $4, $5, $6) AS made",
        )
        .bind(tenant)
        .bind(name)
        .bind(cluster)
        .bind(cell)
        .bind(format!("admin@{tenant}.example"))
        .bind(PASSWORD)
        .fetch_one(&mut connection)
        .await?;
        let key = match (new, kept.get(at)) {
            (Some(new), _) => new,
            (None, Some(kept)) if is_live(&mut connection, cluster_id, kept).await? => kept.clone(),
            // The database is older than our folder: its keys cannot be read back, so make one.
            _ => issue(&mut connection, cluster_id).await?,
        };
        keys.push(key);
    }
    if !ephemeral {
        keep_keys(folder, &keys)?;
    }
    Ok(Demo { keys: keys.into_iter().map(Secret::new).collect(), psql: server.psql(folder) })
}

async fn is_live(connection: &mut PgConnection, cluster: Uuid, key: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM queen_proxy.api_keys
                         WHERE cluster_id = $1 AND key_hash = $2 AND revoked_at IS NULL)",
    )
    .bind(cluster)
    .bind(hex::encode(identity::digest(key)))
    .fetch_one(connection)
    .await
}

async fn issue(connection: &mut PgConnection, cluster: Uuid) -> Result<String, sqlx::Error> {
    // Two random UUIDs hold 244 random bits of the system's generator: enough for a key of a demo.
    let key = format!("qk_dev_{}{}", Uuid::new_v4().simple(), &Uuid::new_v4().simple().to_string()[..11]);
    sqlx::query(
        "SELECT queen_proxy.issue_api_key($1, 'dev', $2, ARRAY['produce', 'consume', 'admin', 'read'])",
    )
    .bind(cluster)
    .bind(hex::encode(identity::digest(&key)))
    .execute(connection)
    .await?;
    Ok(key)
}

fn kept_keys(folder: &Path) -> Vec<String> {
    let text = fs::read(folder.join(KEYS_FILE)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// The database holds only digests, so a second run could not print the keys again without this.
fn keep_keys(folder: &Path, keys: &[String]) -> Result<(), DevError> {
    let path = folder.join(KEYS_FILE);
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        file.write_all(&serde_json::to_vec(keys)?)
    };
    write().map_err(|reason| DevError::File { path: path.clone(), reason })
}

impl Demo {
    /// Asks for the proxy's health, and then each tenant for a key that is not there, until all
    /// of it works.
    pub(super) fn wait_until_served(&self, port: u16) -> bool {
        let deadline = Instant::now() + Duration::from_secs(15);
        while Instant::now() < deadline {
            let served = TENANTS.iter().zip(&self.keys).all(|((_, _, cluster), key)| {
                let request = format!(
                    "GET /api/v1/kv/demo/hello HTTP/1.1\r\nHost: {cluster}.localhost\r\n\
                     Authorization: Bearer {}\r\nConnection: close\r\n\r\n",
                    key.expose()
                );
                ask(port, &request).is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
            });
            if served {
                return true;
            }
            sleep(Duration::from_millis(50));
        }
        false
    }

    /// The keys and three lines to paste.
    pub(super) fn instructions(&self, port: u16) -> String {
        let line = |host: &str, key: &Secret, rest: &str| {
            format!(
                "curl -sS -w '\\n' -H 'Host: {host}.localhost' -H 'Authorization: Bearer {}'{rest} \
                 http://127.0.0.1:{port}/api/v1/kv/demo/hello",
                key.expose()
            )
        };
        let (acme, globex) = (&self.keys[0], &self.keys[1]);
        let sign_in = format!(
            "curl -sS -w '\\n' -L -b '' -H 'Host: acme-prod.localhost' -d email=admin@acme.example \
             -d password={PASSWORD} -d next=/auth/me http://127.0.0.1:{port}/auth/login"
        );
        format!(
            "\nready: http://127.0.0.1:{port}\n\n  acme   (acme-prod)    {}\n  globex (globex-prod)  {}\n\n\
             # acme stores a value\n{}\n\n# acme reads it\n{}\n\n# globex does not see it\n{}\n\n\
             # acme's admin signs in (a page for browsers is at the same place)\n{}\n\n\
             # the control plane's SQL, for example: SELECT slug, status FROM queen_proxy.tenants;\n{}\n\n\
             Ctrl-C stops everything.",
            acme.expose(),
            globex.expose(),
            line("acme-prod", acme, r#" -X PUT -d '{"value":{"greeting":"hello"},"forever":true}'"#),
            line("acme-prod", acme, ""),
            line("globex-prod", globex, ""),
            sign_in,
            self.psql,
        )
    }
}

fn ask(port: u16, request: &str) -> Option<String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
    socket.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    socket.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).ok()?;
    Some(answer)
}
