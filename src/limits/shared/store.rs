//! Talking to Redis or Valkey: three scripts, sent by their digest, many at a time.

use super::{PATIENCE, lease, places};
use crate::domain::{ids::ClusterId, secret::Secret};
use redis::{
    AsyncConnectionConfig, Client, IntoConnectionInfo, Pipeline, RedisError, Script,
    aio::MultiplexedConnection,
};
use std::time::Duration;
use tokio::time::timeout;
use uuid::Uuid;

/// A proxy that was not heard of for this long is gone, and what it held with it.
const GONE: Duration = Duration::from_secs(3);
/// Longest time to get a connection, for which no request waits.
const CONNECT: Duration = Duration::from_secs(1);

/// Where the store is.
#[derive(Clone, Debug)]
pub struct Settings {
    url: Secret,
    place: String,
    prefix: String,
}

impl Settings {
    /// A `redis://` or `rediss://` URL; none when it is no good one. The URL may hold a password.
    pub fn parse(url: &str, prefix: String) -> Option<Self> {
        let parsed = url::Url::parse(url).ok().filter(|url| matches!(url.scheme(), "redis" | "rediss"))?;
        parsed.host_str().filter(|host| !host.is_empty())?;
        url.into_connection_info().ok()?;
        let mut place = parsed;
        // What is asked for in a query is nothing for messages either.
        place.set_query(None);
        place.set_fragment(None);
        place.set_password(None).ok()?;
        place.set_username("").ok()?;
        Some(Self { url: Secret::new(url), place: place.into(), prefix })
    }

    /// The URL without who we are there.
    pub fn place(&self) -> &str {
        &self.place
    }
}

/// Why there is no answer, in words that hold no secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StoreError {
    /// It was not there in time.
    #[error("no answer in time")]
    Late,
    /// It has no script of this digest: it was restarted, or told to forget them.
    #[error("the scripts are gone")]
    Forgotten,
    /// What the client library calls it, with the server's code.
    #[error("{0}")]
    Failed(String),
}

impl From<RedisError> for StoreError {
    fn from(error: RedisError) -> Self {
        if error.code() == Some("NOSCRIPT") {
            return Self::Forgotten;
        }
        // The details are the server's own words, which could be anything.
        let category = error.category();
        Self::Failed(error.code().map_or_else(|| category.to_owned(), |code| format!("{category} ({code})")))
    }
}

/// Digests and text of the scripts.
struct Scripts {
    tokens: Script,
    places: Script,
    presence: Script,
}

/// A connection.
pub struct Store {
    connection: MultiplexedConnection,
    scripts: Scripts,
    prefix: String,
    proxy: String,
}

/// What goes out together.
#[derive(Default)]
pub struct Batch(Pipeline);

impl Store {
    /// Connects, and brings the scripts.
    pub async fn connect(settings: &Settings, proxy: Uuid) -> Result<Self, StoreError> {
        let client = Client::open(settings.url.expose())?;
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let connecting = client.get_multiplexed_async_connection_with_config(&config);
        let connection = timeout(CONNECT, connecting).await.map_err(|_| StoreError::Late)??;
        let scripts = Scripts {
            tokens: Script::new(include_str!("tokens.lua")),
            places: Script::new(include_str!("places.lua")),
            presence: Script::new(include_str!("presence.lua")),
        };
        let (prefix, proxy) = (settings.prefix.clone(), proxy.simple().to_string());
        let mut store = Self { connection, scripts, prefix, proxy };
        timeout(CONNECT, store.load()).await.map_err(|_| StoreError::Late)??;
        Ok(store)
    }

    /// The answers to a batch, each two numbers.
    pub async fn send(&mut self, batch: &Batch) -> Result<Vec<(i64, i64)>, StoreError> {
        let sending = async {
            match batch.0.query_async(&mut self.connection).await.map_err(StoreError::from) {
                // Scripts are gone for all of them, so nothing has happened yet.
                Err(StoreError::Forgotten) => {
                    self.load().await?;
                    Ok(batch.0.query_async(&mut self.connection).await?)
                }
                answers => answers,
            }
        };
        let answers: Vec<(i64, i64)> = timeout(PATIENCE, sending).await.map_err(|_| StoreError::Late)??;
        if answers.len() == batch.0.len() {
            Ok(answers)
        } else {
            Err(StoreError::Failed("fewer answers than questions".to_owned()))
        }
    }

    async fn load(&mut self) -> Result<(), StoreError> {
        let mut pipeline = Pipeline::new();
        for text in [include_str!("tokens.lua"), include_str!("places.lua"), include_str!("presence.lua")] {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(text).ignore();
        }
        Ok(pipeline.exec_async(&mut self.connection).await?)
    }

    /// Says that this proxy is there, or leaves, and asks how many there are.
    pub fn presence(&self, batch: &mut Batch, present: bool) {
        let script = &self.scripts.presence;
        batch.call(script, &[self.proxies()]).arg(&self.proxy).arg(u8::from(present)).arg(gone_ms());
    }

    /// Asks for tokens of one of a cluster's buckets.
    pub fn tokens(&self, batch: &mut Batch, cluster: ClusterId, kind: &str, ask: &lease::Ask, proxies: u64) {
        let key = format!("{}:{kind}:{}", self.prefix, cluster.0);
        // Beyond this the script's numbers are not exact; nothing that is leased comes near.
        let number = |n: u64| n.min(10 * lease::LARGEST);
        let deepest = ask.rate.deepest() / i128::from(super::super::clock::SECOND);
        batch
            .call(&self.scripts.tokens, &[key])
            .arg(ask.rate.per_second)
            .arg(ask.rate.burst)
            .arg(number(ask.back))
            .arg(number(ask.owed))
            .arg(i64::try_from(deepest).unwrap_or(i64::MIN))
            .arg(number(ask.apart))
            .arg(-number(ask.apart_debt).cast_signed())
            .arg(number(ask.needs))
            .arg(number(ask.smallest))
            .arg(number(ask.held))
            .arg(number(ask.more))
            .arg(proxies);
    }

    /// Asks for places of a cluster's waiting pops.
    pub fn places(&self, batch: &mut Batch, cluster: ClusterId, ask: &places::Ask, proxies: u64) {
        let key = format!("{}:parked:{}", self.prefix, cluster.0);
        // No machine holds more polls than this.
        let number = |n: u64| n.min(1 << 40);
        batch
            .call(&self.scripts.places, &[key, self.proxies()])
            .arg(&self.proxy)
            .arg(number(ask.usable))
            .arg(number(ask.needed))
            .arg(number(ask.liked))
            .arg(number(ask.cap))
            .arg(proxies)
            .arg(gone_ms());
    }

    fn proxies(&self) -> String {
        format!("{}:proxies", self.prefix)
    }
}

impl Batch {
    fn call(&mut self, script: &Script, keys: &[String]) -> &mut Pipeline {
        self.0.cmd("EVALSHA").arg(script.get_hash()).arg(keys.len()).arg(keys)
    }
}

fn gone_ms() -> u64 {
    GONE.as_secs() * 1_000
}
