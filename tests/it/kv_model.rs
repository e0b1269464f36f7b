//! `kv_apply_v1` against a model small enough to be read in one sitting, on random programs, expiries included:
//! the instant of a call is a parameter of the function. And random nonsense, which may be refused, but never
//! fails. Full size: `QUEEN_TEST_ROUNDS=20000 cargo test --test it kv_model`.

mod model;
mod nonsense;

use crate::support::{World, rounds};
use model::{Call, Model, Verdict, instant};
use proptest::{
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use serde_json::{Value, json};
use sqlx::{PgConnection, Row};
use std::collections::HashSet;
use tokio::{runtime::Runtime, sync::Mutex};
use uuid::Uuid;

/// Runs a property as often as this run is to do. A failure is shrunk and printed with its seed;
/// `PROPTEST_RNG_SEED` and `PROPTEST_RNG_ALGORITHM` of proptest repeat a run.
fn check<S: Strategy>(usual: u32, strategy: &S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { cases: rounds(usual), failure_persistence: None, ..Config::default() };
    if let Err(error) = TestRunner::new(config).run(strategy, property) {
        panic!("{error}");
    }
}

/// Runs programs in the database of a cell whose sweeper keeps out of them.
fn check_programs(run: &impl AsyncFn(&mut PgConnection, Vec<Call>) -> Result<(), TestCaseError>) {
    let runtime = Runtime::new().unwrap();
    let world = runtime.block_on(World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "off").start());
    let database = Mutex::new(runtime.block_on(async {
        let mut database = world.cell_database().await;
        sqlx::query("SET TimeZone = 'UTC'").execute(&mut database).await.unwrap();
        database
    }));
    check(96, &model::program(), |calls| {
        runtime.block_on(async { run(&mut *database.lock().await, calls).await })
    });
    runtime.block_on(async { drop(world) });
}

#[test]
fn every_call_comes_to_what_the_model_says() {
    check_programs(&run);
}

/// Runs a program for a tenant of its own, comparing each answer and the whole table after it.
async fn run(database: &mut PgConnection, calls: Vec<Call>) -> Result<(), TestCaseError> {
    let (tenant, mut model, mut now, mut versions) = (Uuid::new_v4(), Model::default(), 0, HashSet::new());
    for call in calls {
        now += call.pause;
        let operations = call.operations(&model);
        let answer =
            sqlx::query_scalar::<_, Value>("SELECT queen.kv_apply_v1($1, $2, $3::timestamptz, false)")
                .bind(&operations)
                .bind(tenant)
                .bind(instant(now))
                .fetch_one(&mut *database)
                .await;
        let answer = answer.map_err(|error| error.into_database_error().expect("an error of the function"));
        let given = answer.as_ref().ok();
        let mut next = model.clone();
        let verdict =
            next.apply(&operations, now, |at| given.and_then(|given| given[at]["version"].as_i64()));
        match (answer, verdict) {
            (Ok(answer), Verdict::Results { results, fresh }) => {
                prop_assert_eq!(&answer, &results, "{} at {}", operations, now);
                for version in fresh {
                    prop_assert!(version > 0 && versions.insert(version), "version {} again", version);
                }
                model = next;
            }
            (Err(error), Verdict::Lost(detail)) => {
                let found =
                    error.downcast_ref::<sqlx::postgres::PgDatabaseError>().detail().unwrap_or_default();
                prop_assert!(error.code().as_deref() == Some("23514"), "{}", error);
                prop_assert_eq!(serde_json::from_str::<Value>(found).unwrap(), detail, "{}", operations);
            }
            (Err(error), Verdict::Duplicate) => {
                prop_assert_eq!(error.message(), "kv_duplicate_key_in_call", "{}", operations);
            }
            (answer, verdict) => {
                prop_assert!(false, "{} at {}: {:?}, the model says {:?}", operations, now, answer, verdict);
            }
        }
        prop_assert_eq!(table(database, tenant).await, model.rows(), "after {} at {}", operations, now);
    }
    Ok(())
}

/// What `kv_group_v1` answers: a result or an error for each call, as JSON.
const GROUP: &str = "SELECT coalesce(jsonb_agg(coalesce(r.result::jsonb,
                                        jsonb_build_array(state, message, detail)) ORDER BY r.at), '[]')
       FROM queen.kv_group_v1($1, $2, $3::timestamptz) AS g
      CROSS JOIN LATERAL unnest(g.results, g.states, g.messages, g.details)
            WITH ORDINALITY AS r (result, state, message, detail, at)";

/// Calls of one operation that share a transaction, several for one key and lost ones among them: each comes
/// to what the model says of it alone.
#[test]
fn calls_that_share_a_transaction_come_to_what_each_would_alone() {
    check_programs(&run_grouped);
}

/// Runs the operations on one key of each call of a program as calls of their own, for two tenants at once. Every
/// third call keeps its plain puts alone and every third its gets, which the function runs as one statement.
async fn run_grouped(database: &mut PgConnection, calls: Vec<Call>) -> Result<(), TestCaseError> {
    let tenants = [Uuid::new_v4(), Uuid::new_v4()];
    let (mut models, mut now) = ([Model::default(), Model::default()], 0);
    for (turn, call) in calls.into_iter().enumerate() {
        now += call.pause;
        let operations = call.operations(&models[0]);
        let kept = |operation: &&Value| match (turn % 3, operation["op"].as_str().unwrap()) {
            (_, "getMany" | "getPrefix") => false,
            (1, name) => name == "put" && operation.get("expect").is_none(),
            (2, name) => name == "get",
            _ => true,
        };
        let group: Vec<(usize, Value)> = operations
            .as_array()
            .unwrap()
            .iter()
            .filter(kept)
            .enumerate()
            .flat_map(|(at, operation)| {
                let twice = at % 2 == 0;
                [0, 1]
                    .into_iter()
                    .take(1 + usize::from(twice))
                    .map(move |tenant| (tenant, json!([operation])))
            })
            .collect();
        let answers: Value = sqlx::query_scalar(GROUP)
            .bind(group.iter().map(|(_, call)| call.to_string()).collect::<Vec<_>>())
            .bind(group.iter().map(|(tenant, _)| tenants[*tenant]).collect::<Vec<_>>())
            .bind(instant(now))
            .fetch_one(&mut *database)
            .await
            .unwrap();
        prop_assert_eq!(answers.as_array().unwrap().len(), group.len());
        for ((tenant, call), answer) in group.iter().zip(answers.as_array().unwrap()) {
            let mut next = models[*tenant].clone();
            match next.apply(call, now, |_| answer["version"].as_i64()) {
                Verdict::Results { results, .. } => {
                    prop_assert_eq!(&json!([answer]), &results, "{} at {}", call, now);
                    models[*tenant] = next;
                }
                Verdict::Lost(detail) => {
                    prop_assert_eq!(&answer[0], "23514", "{}", call);
                    let found = answer[2].as_str().unwrap_or_default();
                    prop_assert_eq!(serde_json::from_str::<Value>(found).unwrap(), detail, "{}", call);
                }
                Verdict::Duplicate => prop_assert!(false, "one operation is no duplicate"),
            }
        }
        for (tenant, model) in tenants.iter().zip(&models) {
            prop_assert_eq!(table(database, *tenant).await, model.rows(), "after {:?} at {}", group, now);
        }
    }
    Ok(())
}

/// All rows of a tenant, dead ones too, as the model shows its own.
async fn table(database: &mut PgConnection, tenant: Uuid) -> Vec<Value> {
    const ROWS: &str =
        "SELECT jsonb_build_object('ns', namespace, 'key', key, 'value', value, 'version', version,
                               'expires', expires_at, 'created', created_at, 'updated', updated_at)
                          FROM queen.kv WHERE tenant_id = $1 ORDER BY namespace, key";
    let rows = sqlx::query(ROWS).bind(tenant).fetch_all(database).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[test]
fn nonsense_is_refused_and_never_fails() {
    let runtime = Runtime::new().unwrap();
    let world = runtime.block_on(World::builder().proxies(0).cell_env("QUEEN_SWEEPER", "off").start());
    let socket = Mutex::new(runtime.block_on(crate::support::Socket::open(world.cell_port)));
    let bearer = format!("Host: cell\r\nAuthorization: Bearer {}\r\n", world.cell_secret);
    check(400, &nonsense::batch(), |operations| {
        runtime.block_on(async {
            let tenant = Uuid::new_v4();
            let post = |route: &str, body: String| {
                let length = body.len();
                format!(
                    "POST {route} HTTP/1.1\r\n{bearer}x-queen-tenant: {tenant}\r\nContent-Length: {length}\r\n\r\n{body}"
                )
            };
            let kv = Value::Array(operations);
            for (route, body) in
                [("/api/v1/transaction", json!({"operations": [], "kv": kv})), ("/api/v1/kv", kv.clone())]
            {
                let answer = socket.lock().await.ask(post(route, body.to_string())).await;
                let shown = answer.json();
                prop_assert!(matches!(answer.status, 200 | 400 | 413), "{}: {} {}", body, answer.status, shown);
                let reason = shown["reason"].as_str();
                prop_assert!(reason != Some("db_error") && reason != Some("misaligned"), "{}: {}", body, shown);
                if answer.status == 200 && route == "/api/v1/kv" && shown.get("results").is_some() {
                    let answers = shown["results"].as_array().unwrap().len();
                    prop_assert_eq!(answers, kv.as_array().unwrap().len());
                } else if answer.status != 200 {
                    prop_assert!(shown["error"].is_string() && reason.is_some(), "{}", shown);
                }
            }
            Ok(())
        })
    });
    runtime.block_on(async { drop(world) });
}
