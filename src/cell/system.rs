//! `/api/v1/system/kv-timers`: the kill switch (KV contract, section 8).
//!
//! Whoever has the cell's secret may call it. The proxy has it, and lets operators through and nobody else.

use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::answers::answer;
use super::control::Control;
use super::errors::KvError;
use super::gate::Gate;

/// Most bytes of a request's body.
pub(super) const MAX_BODY: usize = 4096;

/// What may be switched; what is not there stays.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wanted {
    kv: Option<bool>,
    timers_schedule: Option<bool>,
    timers_fire: Option<bool>,
}

impl Wanted {
    fn read(body: &[u8]) -> Result<[Option<bool>; 3], KvError> {
        let wanted: Self = serde_json::from_slice(body)
            .map_err(|error| KvError::BadSwitches(format!("bad body: {error}")))?;
        let wanted = [wanted.kv, wanted.timers_schedule, wanted.timers_fire];
        if wanted == [None; 3] {
            return Err(KvError::BadSwitches("name at least one of kv, timersSchedule, timersFire".into()));
        }
        Ok(wanted)
    }
}

/// The switches as the database has them, or as they are in force here when it cannot be asked.
pub(super) async fn show(gate: &Gate, control: &Control) -> Response {
    // What the loop does not get it has already said.
    let _ = control.sync_switches().await;
    let [kv, timers_schedule, timers_fire] = gate.switches.all();
    let snapshot = control.snapshot();
    let age = snapshot.at.map(|at| millis(gate.clock.now().saturating_sub(at)));
    let body = json!({
        "kvEnabled": kv,
        "timersScheduleEnabled": timers_schedule,
        "timersFireEnabled": timers_fire,
        "quotaTenants": snapshot.quotas.len(),
        "quotaAgeMs": age,
        "quotaHot": gate.ladder.is_hot(),
    });
    answer(StatusCode::OK, body.to_string())
}

/// Switches, here at once and in the database if it can be reached.
pub(super) async fn switch(gate: &Gate, control: &Control, body: &[u8]) -> Result<Response, KvError> {
    gate.switches.decide(Wanted::read(body)?, gate.clock.now());
    gate.metrics.switched(gate.switches.kv());
    let mirrored = control.sync_switches().await.is_ok();
    let [kv, timers_schedule, timers_fire] = gate.switches.all();
    let message = if mirrored {
        "in force here, and within a second on every cell of this database"
    } else {
        "in force here only; other cells follow when the database can be written again"
    };
    let body = json!({
        "kvEnabled": kv,
        "timersScheduleEnabled": timers_schedule,
        "timersFireEnabled": timers_fire,
        "mirrored": mirrored,
        "message": message,
    });
    Ok(answer(StatusCode::OK, body.to_string()))
}

fn millis(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies() {
        for (body, expected) in [
            (r#"{"kv":false}"#, Ok([Some(false), None, None])),
            (r#"{"kv":null,"timersFire":true}"#, Ok([None, None, Some(true)])),
            (r#"{"kv":true,"timersSchedule":false,"more":1}"#, Ok([Some(true), Some(false), None])),
            ("{}", Err("name at least one")),
            (r#"{"kv":null}"#, Err("name at least one")),
            (r#"{"kv":"false"}"#, Err("bad body: ")),
            ("[true]", Err("bad body: ")),
            ("", Err("bad body: ")),
        ] {
            match (Wanted::read(body.as_bytes()), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{body}"),
                (Err(KvError::BadSwitches(text)), Err(start)) => assert!(text.starts_with(start), "{text}"),
                (found, _) => panic!("{body}: {found:?}"),
            }
        }
    }
}
