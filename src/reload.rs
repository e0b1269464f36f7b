//! SIGHUP: the configuration is read again, and takes effect as a whole or not at all.

use crate::{
    config::{ConfigError, proxy::ProxyConfig, source::Shown},
    gateway::{
        client::tls::{Pair, TlsError},
        live::{Live, Settings},
    },
};
use std::{collections::BTreeMap, sync::Arc};
use tokio::signal::unix::{SignalKind, signal};

/// Settings that a running proxy can change. TLS files are read again also when their names stay.
const CHANGEABLE: [&str; 17] = [
    "QUEEN_PROXY_TRUSTED_PROXIES",
    "QUEEN_PROXY_PROXY_PROTOCOL",
    "QUEEN_PROXY_MAX_CONNECTIONS",
    "QUEEN_PROXY_MAX_CONNECTIONS_PER_ADDRESS",
    "QUEEN_PROXY_TLS_CERT",
    "QUEEN_PROXY_TLS_KEY",
    "QUEEN_PROXY_UPSTREAM_TIMEOUT_MS",
    "QUEEN_PROXY_UPSTREAM_CONNECT_TIMEOUT_MS",
    "QUEEN_PROXY_LONGPOLL_MAX_MS",
    "QUEEN_PROXY_LONGPOLL_MARGIN_MS",
    "QUEEN_PROXY_UPSTREAM_IDLE_MS",
    "QUEEN_PROXY_KEEPALIVE_MS",
    "QUEEN_PROXY_HEAD_TIMEOUT_MS",
    "QUEEN_PROXY_CLIENT_READ_TIMEOUT_MS",
    "QUEEN_PROXY_BODY_TIMEOUT_MS",
    "QUEEN_PROXY_SHUTDOWN_DRAIN_MS",
    "QUEEN_PROXY_SHUTDOWN_DELAY_MS",
];

/// Reads the configuration again.
pub type Load = Box<dyn Fn() -> Result<(ProxyConfig, Vec<Shown>), ConfigError> + Send + Sync>;

/// Why everything stays as it is.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error(transparent)]
    Wrong(#[from] ConfigError),
    #[error("these need a restart: {}", .0.join(", "))]
    NeedRestart(Vec<&'static str>),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Follows SIGHUP for as long as the process lives.
pub async fn follow(load: Load, mut shown: Vec<Shown>, live: Arc<Live>) {
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => return tracing::error!(%error, "SIGHUP cannot be watched: no reloads"),
    };
    while hangups.recv().await.is_some() {
        let outcome = reload(&load, &mut shown, &live);
        live.count(outcome.is_ok());
        match outcome {
            Ok(changed) => tracing::info!(?changed, "configuration reloaded"),
            Err(error) => {
                let error = error.to_string();
                tracing::error!(error, "configuration NOT reloaded: everything stays as it was");
            }
        }
    }
}

/// Takes over what has changed; tells what that is.
fn reload(load: &Load, shown: &mut Vec<Shown>, live: &Live) -> Result<Vec<&'static str>, Refused> {
    let (config, now) = load()?;
    let changed = differences(shown, &now);
    let fixed = |name: &&str| {
        let tls = live.tls.is_none() && name.starts_with("QUEEN_PROXY_TLS_");
        tls || !CHANGEABLE.contains(name)
    };
    let fixed: Vec<_> = changed.iter().copied().filter(fixed).collect();
    if !fixed.is_empty() {
        return Err(Refused::NeedRestart(fixed));
    }
    let pair = match (&live.tls, &config.tls) {
        (Some(_), Some(files)) => Some(Pair::load(files)?),
        (Some(_), None) => return Err(Refused::NeedRestart(vec!["QUEEN_PROXY_TLS_CERT"])),
        (None, _) => None,
    };
    // From here on nothing can fail.
    if let (Some(tls), Some(pair)) = (&live.tls, pair) {
        tls.replace(pair);
    }
    live.replace(Settings::of(&config));
    *shown = now;
    Ok(changed)
}

/// Names of what is not the same. Of secrets only whether they are set can be told apart.
fn differences(old: &[Shown], new: &[Shown]) -> Vec<&'static str> {
    let values: BTreeMap<_, _> = old.iter().map(|line| (line.name, &line.value)).collect();
    new.iter().filter(|line| values.get(line.name) != Some(&&line.value)).map(|line| line.name).collect()
}
