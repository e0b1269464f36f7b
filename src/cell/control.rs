//! What a cell hears from its database while it serves: switches and quotas, asked for by each cell on its
//! own connection (KV contract, sections 7.5 and 8; Q12).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as AsyncMutex;
use tokio::time::sleep;
use uuid::Uuid;

use super::gate::Gate;
use super::ladder::{LadderSettings, Quota, Usage};
use super::line::{Line, LineError};
use super::switches::NAMES;

/// How long another cell's kill switch takes to get here, at most, while the database answers.
const SWITCH_POLL: Duration = Duration::from_secs(1);

/// Longest wait for an answer: a statement of one row or of ten thousand.
pub(super) const CONTROL_LIMIT: Duration = Duration::from_secs(5);

const SWITCHES: &str = "SELECT queen.kv_switches_v1()::text";
const SET_SWITCHES: &str = "SELECT queen.kv_switches_set_v1($1::text::jsonb, $2)::text";
const QUOTAS: &str = "SELECT queen.kv_quota_refresh_v1($1)::text";

/// What the last refresh brought.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    pub quotas: Arc<[Quota]>,
    /// When it came; `None` before the first.
    pub at: Option<Duration>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Control {
    gate: Arc<Gate>,
    switch_line: AsyncMutex<Line>,
    quota_line: AsyncMutex<Line>,
    snapshot: Mutex<Snapshot>,
    max_tenants: u32,
    refresh_every: Duration,
}

impl Control {
    pub(super) fn new(gate: Arc<Gate>, settings: &LadderSettings, line: impl Fn() -> Line) -> Self {
        Self {
            gate,
            switch_line: AsyncMutex::new(line()),
            quota_line: AsyncMutex::new(line()),
            snapshot: Mutex::default(),
            max_tenants: settings.max_tenants,
            refresh_every: settings.refresh_every,
        }
    }

    /// What a tenant keeps, as it was last measured; none when that is not known: more tenants than are kept.
    pub(super) fn usage_of(&self, tenant: Uuid) -> Option<Usage> {
        let snapshot = self.snapshot();
        let found = snapshot.quotas.iter().find(|quota| quota.tenant == tenant).map(Quota::usage);
        let all = snapshot.at.is_some() && snapshot.quotas.len() < self.max_tenants as usize;
        found.or(all.then(Usage::default))
    }

    /// What the last refresh brought.
    pub(super) fn snapshot(&self) -> Snapshot {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes what was decided here and takes over what was decided elsewhere.
    pub(super) async fn sync_switches(&self) -> Result<(), LineError> {
        let switches = &self.gate.switches;
        let mut line = self.switch_line.lock().await;
        let unwritten = switches.unwritten();
        let now = self.gate.clock.now();
        for (name, decision) in NAMES.into_iter().zip(unwritten) {
            let Some((on, at)) = decision else { continue };
            let age = i64::try_from(now.saturating_sub(at).as_millis()).unwrap_or(i64::MAX);
            let wanted = format!(r#"{{"{name}":{on}}}"#);
            line.ask(sqlx::query_scalar(SET_SWITCHES).bind(wanted).bind(age)).await?;
        }
        switches.written(unwritten);
        let rows = line.ask(sqlx::query_scalar(SWITCHES)).await?;
        let rows: HashMap<String, bool> = serde_json::from_str(&rows).map_err(|_| LineError::Unreadable)?;
        let row = |at: usize| rows.get(NAMES[at]).copied().ok_or(LineError::Unreadable);
        switches.adopt([row(0)?, row(1)?, row(2)?]);
        self.gate.metrics.switched(switches.kv());
        Ok(())
    }

    /// Reads the quotas and usages of all tenants and puts them in force. On failure the old ones stay.
    pub(super) async fn refresh_quotas(&self) -> Result<(), LineError> {
        let most = i32::try_from(self.max_tenants).unwrap_or(i32::MAX);
        let text = self.quota_line.lock().await.ask(sqlx::query_scalar(QUOTAS).bind(most)).await?;
        let quotas: Arc<[Quota]> = Quota::read(&text).map_err(|_| LineError::Unreadable)?.into();
        if quotas.len() >= self.max_tenants as usize {
            tracing::warn!(
                limit = self.max_tenants,
                "QUEEN_KV_MAX_TENANTS is reached: quotas of further tenants are not known"
            );
        }
        let now = self.gate.clock.now();
        self.gate.ladder.refresh(&quotas, now);
        self.gate.metrics.quotas_read();
        *self.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = Snapshot { quotas, at: Some(now) };
        Ok(())
    }

    /// Both, once, before the first request: a cell that does not know them would serve in spite of a pause, and
    /// refuse tenants that have a grant.
    pub(super) async fn start(&self) -> Result<(), LineError> {
        self.sync_switches().await?;
        self.refresh_quotas().await
    }

    /// Both, for ever.
    pub(super) async fn run(&self) {
        tokio::join!(
            keep_at("switches", SWITCH_POLL, || self.sync_switches()),
            keep_at("quotas", self.refresh_every, || self.refresh_quotas()),
        );
    }
}

/// Repeats `ask`; the log hears when it begins to fail and when it works again.
async fn keep_at<F>(what: &str, every: Duration, ask: impl Fn() -> F)
where
    F: Future<Output = Result<(), LineError>>,
{
    let mut failing = false;
    loop {
        sleep(every).await;
        match ask().await {
            Ok(()) if failing => {
                tracing::info!("{what} are read again");
                failing = false;
            }
            Err(error) if !failing => {
                tracing::warn!(%error, "{what} cannot be read; the last ones stay in force");
                failing = true;
            }
            Ok(()) | Err(_) => {}
        }
    }
}
