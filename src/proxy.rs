//! `queen-proxy serve`: puts the rooms together.

use crate::{
    config::proxy::{DevCell, ProxyConfig},
    control::{
        ControlPlane, listener,
        migrate::{MigrateError, migrate},
        snapshot::ClusterRow,
        store::StoreError,
    },
    domain::ids::BrokerTenant,
    gateway::{pipeline::Directory, server},
    identity::{
        CookieNames, Identity,
        session::{KeyError, SessionKeys},
    },
};
use std::sync::Arc;
use tokio::runtime::{Builder, Runtime};

/// Why the proxy does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The control plane's schema is not there and could not be made.
    #[error("control plane at {place}: {error}")]
    Migrate {
        /// Server, database and role.
        place: String,
        /// What went wrong there.
        error: MigrateError,
    },
    /// The one cell of a proxy without a control plane is not usable.
    #[error("QUEEN_PROXY_DEV_CELL_URL: {0}")]
    DevCell(#[from] StoreError),
    /// The keys of sessions; the configuration refuses these before.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The listener.
    #[error(transparent)]
    Serve(#[from] server::ServeError),
    /// No threads.
    #[error("cannot start the control runtime: {0}")]
    Runtime(#[from] std::io::Error),
}

/// Serves until it is told to stop. Blocks; must not be called from inside a runtime.
pub fn serve(config: &ProxyConfig) -> Result<(), ProxyError> {
    // Database work has threads of its own: it must outlive Pingora's runtimes and not take theirs.
    let runtime =
        Builder::new_multi_thread().worker_threads(2).thread_name("control").enable_all().build()?;
    let directory = directory(config, &runtime)?;
    if config.pxdb.is_some() && !config.tenant_header {
        tracing::warn!(
            "ALL TENANTS SHARE ONE TENANT OF THE CELL: QUEEN_PROXY_TENANT_HEADER is off with a control plane"
        );
    }
    server::run(config, directory)?;
    runtime.shutdown_background();
    Ok(())
}

fn directory(config: &ProxyConfig, runtime: &Runtime) -> Result<Directory, ProxyError> {
    if let Some(cell) = &config.dev_cell {
        return runtime.block_on(static_cluster(cell));
    }
    let Some(pxdb) = &config.pxdb else {
        // The configuration refuses this before.
        return Err(StoreError::Malformed("no control plane is configured").into());
    };
    let applied = runtime
        .block_on(migrate(pxdb))
        .map_err(|error| ProxyError::Migrate { place: pxdb.place(), error })?;
    if !applied.is_empty() {
        tracing::info!(?applied, "control-plane schema brought up to date");
    }
    let control = {
        let _inside = runtime.enter();
        ControlPlane::new(pxdb, config.cache)
    };
    runtime.spawn(listener::run(pxdb.clone(), control.clone()));
    runtime.spawn(control.clone().touch_keys(config.key_touch));
    runtime.spawn(control.clone().sweep());
    runtime.spawn(control.deny_list().clone().learn_ends());
    runtime.spawn(control.clone().sweep_revoked(config.sessions.revocation_sweep));
    let sessions = SessionKeys::new(&config.sessions.keys)?;
    if sessions.is_none() {
        tracing::warn!("no key for sessions is configured: only API keys are accepted");
    }
    Ok(Directory::Control(Arc::new(Identity {
        control,
        sessions,
        cookies: {
            let cookies = &config.sessions.auth.cookies;
            CookieNames::new(&cookies.name, cookies.is_secure(false))
        },
        operators: config.sessions.operators,
        strict: config.sessions.revocation_strict,
    })))
}

async fn static_cluster(cell: &DevCell) -> Result<Directory, ProxyError> {
    let row = ClusterRow::synthetic(cell.url.clone(), cell.token.clone(), BrokerTenant(cell.tenant))
        .ok_or(StoreError::Malformed("no synthetic cluster"))?;
    Ok(Directory::Static(Arc::new(row.into_cluster().await?)))
}
