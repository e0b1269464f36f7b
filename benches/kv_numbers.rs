//! The settings of `queen.kv` that have to be measured: fill factor, the reading of the usage roll-up, and what
//! autovacuum takes. PostgreSQL is real and private; the calls go to its functions, without a cell.
//!
//! `cargo bench --bench kv_numbers` for everything, or `… -- fillfactor`, `… -- usage`, `… -- autovacuum`; the
//! figures belong into `benches/RESULTS.md` and beside the settings in `migrations/cell`. `QUEEN_BENCH_SECONDS`
//! (15) is the length of one load, `QUEEN_BENCH_ROWS` (10000000) the size of the largest table.

#![allow(missing_docs, clippy::unwrap_used, clippy::cast_precision_loss)]

use queen_proxy::{
    cell::CELL_SQL,
    dev::postgres::{Postgres, Settings, free_port},
};
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use std::{
    fs,
    path::PathBuf,
    str::FromStr,
    time::{Duration, Instant},
};
use tokio::{task::JoinSet, time::sleep};

const TENANT: &str = "00000000-0000-0000-0000-000000000001";
const CLIENTS: u64 = 4;
/// Counters, or keys with a lifetime, of a load: few, so that each is written many times.
const KEYS: u64 = 2_000;
/// The table's line of statistics.
const STATS: &str = "FROM pg_stat_user_tables WHERE relid = 'queen.kv'::regclass";

/// A server that is gone afterwards.
struct Stand {
    server: Postgres,
    folder: PathBuf,
}

impl Drop for Stand {
    fn drop(&mut self) {
        self.server.stop();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Stand {
    async fn start() -> Self {
        let folder = std::env::temp_dir().join(format!("queen-bench-{}", uuid::Uuid::new_v4().simple()));
        let settings = Settings { folder: folder.clone(), port: free_port(), throw_away: false };
        let stand = Self { server: Postgres::start(settings).unwrap(), folder };
        run(&mut stand.connect("postgres").await, "CREATE DATABASE cell").await;
        // A busy table is vacuumed as often as it asks for it, not once a minute.
        run(&mut stand.connect("postgres").await, "ALTER SYSTEM SET autovacuum_naptime = '1s'").await;
        run(&mut stand.connect("postgres").await, "SELECT pg_reload_conf()").await;
        stand.install().await;
        stand
    }

    async fn connect(&self, database: &str) -> PgConnection {
        PgConnection::connect_with(&self.server.connect_options(database)).await.unwrap()
    }

    /// The schema, on an empty database.
    async fn install(&self) {
        let mut database = self.connect("cell").await;
        run(&mut database, "DROP SCHEMA IF EXISTS queen CASCADE").await;
        for file in CELL_SQL {
            run(&mut database, file).await;
        }
    }
}

async fn run(database: &mut PgConnection, statement: &str) {
    sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(database).await.unwrap();
}

async fn figure(database: &mut PgConnection, query: &str) -> f64 {
    sqlx::query(AssertSqlSafe(format!("SELECT ({query})::text::float8")))
        .fetch_one(database)
        .await
        .unwrap()
        .get(0)
}

/// Statistics of finished transactions reach the views within a second or so of the last one.
async fn settled(database: &mut PgConnection, query: &str) -> f64 {
    let mut last = figure(database, query).await;
    loop {
        sleep(Duration::from_millis(1_500)).await;
        let next = figure(database, query).await;
        if next <= last {
            return next;
        }
        last = next;
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Load {
    /// Counters are incremented.
    Counters,
    /// Keys are written anew with a lifetime of two seconds; a sweeper prunes them.
    Lifetimes,
}

impl Load {
    /// A call on a random key, as an expression of SQL.
    fn call(self) -> String {
        let members = match self {
            Self::Counters => "'op', 'incr', 'delta', 1, 'forever', true",
            Self::Lifetimes => {
                "'op', 'put', 'ttlSeconds', 2,
                 'value', '{\"user\": \"somebody\", \"note\": \"abcdefghijklmnopqrstuvwxyz\"}'::jsonb"
            }
        };
        format!(
            "jsonb_build_array(jsonb_build_object('ns', 'ns', 'key', 'key-' || floor(random() * {KEYS}), {members}))"
        )
    }
}

/// Calls within `window`, by all clients.
async fn drive(stand: &Stand, load: Load, window: Duration) -> f64 {
    let end = Instant::now() + window;
    let mut tasks = JoinSet::new();
    for _ in 0..CLIENTS {
        let mut database = stand.connect("cell").await;
        // As many transactions as the processor takes: what becomes of rows depends neither on the disk nor on how
        // fast a client is.
        run(&mut database, "SET synchronous_commit = off").await;
        let program = format!(
            "DO $$
             DECLARE
                 v_end   timestamptz := clock_timestamp() + interval '{} s';
                 v_calls integer := 0;
             BEGIN
                 WHILE clock_timestamp() < v_end LOOP
                     PERFORM queen.kv_apply_v1({}, '{TENANT}', NULL, false);
                     COMMIT;
                     v_calls := v_calls + 1;
                 END LOOP;
                 PERFORM set_config('bench.calls', v_calls::text, false);
             END $$",
            window.as_secs(),
            load.call()
        );
        tasks.spawn(async move {
            run(&mut database, &program).await;
            figure(&mut database, "SELECT current_setting('bench.calls')").await
        });
    }
    if load == Load::Lifetimes {
        let mut database = stand.connect("cell").await;
        tasks.spawn(async move {
            while Instant::now() < end {
                run(
                    &mut database,
                    "SELECT queen.kv_expire_step_v1(ARRAY(SELECT generate_series(0, 63)::smallint), NULL, 1000)",
                )
                .await;
                sleep(Duration::from_millis(250)).await;
            }
            0.0
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// (a): share of HOT updates, growth of the table, calls a second.
async fn fillfactor(stand: &Stand, window: Duration) {
    println!("\nfill factor, {CLIENTS} clients, {KEYS} keys, {window:?} each");
    println!("load         fill factor   calls/s   HOT updates   heap MB before, after   index MB after");
    for load in [Load::Counters, Load::Lifetimes] {
        for percent in [50, 70, 85, 100] {
            stand.install().await;
            let mut database = stand.connect("cell").await;
            run(&mut database, &format!("ALTER TABLE queen.kv SET (fillfactor = {percent})")).await;
            run(
                &mut database,
                &format!(
                    "INSERT INTO queen.kv (namespace, key, value, version, expires_at)
                     SELECT 'ns', 'key-' || n, {value}, nextval('queen.kv_version_seq'), {end}
                       FROM generate_series(0, {KEYS} - 1) AS n",
                    value = if load == Load::Counters {
                        "'0'"
                    } else {
                        r#"'{"user":"somebody","since":1,"note":"abcdefghijklmnopqrstuvwxyz"}'"#
                    },
                    end = if load == Load::Counters { "NULL" } else { "now() + interval '2 s'" },
                ),
            )
            .await;
            run(&mut database, "VACUUM ANALYZE queen.kv").await;
            run(&mut database, "CHECKPOINT").await;
            let before = figure(&mut database, "SELECT pg_relation_size('queen.kv') / 1048576.0").await;
            let calls = drive(stand, load, window).await;
            let updates = settled(&mut database, &format!("SELECT n_tup_upd {STATS}")).await;
            let hot = figure(&mut database, &format!("SELECT n_tup_hot_upd {STATS}")).await;
            let after = figure(&mut database, "SELECT pg_relation_size('queen.kv') / 1048576.0").await;
            let indexes = figure(&mut database, "SELECT pg_indexes_size('queen.kv') / 1048576.0").await;
            println!(
                "{:12} {percent:11} {:9.0} {:11.1} % {before:14.1} {after:8.1} {indexes:16.1}",
                format!("{load:?}"),
                calls / window.as_secs_f64(),
                hot / updates.max(1.0) * 100.0
            );
        }
    }
}

/// Rows of the table that this session has read and not yet reported.
const TUPLES: &str = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables
                       WHERE relid = 'queen.kv'::regclass";

/// (b): the roll-up of usage at growing sizes, exact and sampled.
async fn usage(stand: &Stand, largest: u64) {
    println!("\nusage roll-up: 100 tenants with shares from 1 to 100, values of 20 to 420 bytes");
    println!(
        "      rows  roll-up    seconds   blocks read, of the table   rows read   error: all, mean, worst tenant"
    );
    stand.install().await;
    let mut database = stand.connect("cell").await;
    let mut rows = 0;
    for size in [500_000, 2_000_000, 5_000_000, 10_000_000].map(|size: u64| size.min(largest)) {
        if size <= rows {
            continue;
        }
        // Filled without waiting for the disk, and without the autovacuum that would read along.
        run(
            &mut database,
            "ALTER TABLE queen.kv SET (autovacuum_enabled = off); SET synchronous_commit = off",
        )
        .await;
        run(
            &mut database,
            &format!(
                "INSERT INTO queen.kv (tenant_id, namespace, key, value, version, expires_at)
                 SELECT ('00000000-0000-0000-0000-' || lpad(ceil(100 * sqrt((n * 7919 % 10007) / 10007.0))::int::text, 12, '0'))::uuid,
                        'ns', 'key-' || n, to_jsonb(repeat('x', 20 + (n * 31 % 400)::int)), n,
                        CASE WHEN n % 2 = 0 THEN now() + interval '30 days' END
                   FROM generate_series({rows} + 1, {size}::bigint) AS n"
            ),
        )
        .await;
        rows = size;
        run(&mut database, "VACUUM (ANALYZE) queen.kv").await;
        run(&mut database, "CHECKPOINT").await;
        let mut exact = Vec::new();
        for (name, shards) in [("exact", 64), ("sampled", 8)] {
            run(&mut database, "BEGIN").await;
            if name == "exact" {
                // The function samples when it believes the table to be large.
                let small = "UPDATE pg_class SET reltuples = 200000 WHERE oid = 'queen.kv'::regclass";
                run(&mut database, small).await;
            }
            let before = figure(&mut database, TUPLES).await;
            let started = Instant::now();
            let text: String = sqlx::query_scalar(
                "SELECT queen.kv_usage_step_v1(ARRAY(SELECT generate_series(0, 63)::smallint), NULL, NULL)::text",
            )
            .fetch_one(&mut database)
            .await
            .unwrap();
            let took = started.elapsed().as_secs_f64();
            let fetched = figure(&mut database, TUPLES).await - before;
            run(&mut database, "ROLLBACK").await;
            let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["sampled"], name == "sampled");
            let mut found = vec![0.0; 101];
            for tenant in answer["tenants"].as_array().unwrap() {
                let number: usize =
                    tenant["tenant"].as_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
                found[number] += tenant["kvRows"].as_f64().unwrap();
            }
            let read = explain(&mut database, shards).await;
            let blocks = figure(&mut database, "SELECT pg_relation_size('queen.kv') / 8192").await;
            if name == "exact" {
                exact.clone_from(&found);
            }
            let total: f64 = exact.iter().sum();
            let errors: Vec<f64> = (1..=100)
                .filter(|n| exact[*n] > 0.0)
                .map(|n| ((found[n] - exact[n]) / exact[n] * 100.0).abs())
                .collect();
            println!(
                "{rows:10}  {name:8} {took:9.2} {read:13.0} {blocks:14.0} {fetched:11.0}   {:.2} %, {:.2} %, {:.2} %",
                ((found.iter().sum::<f64>() - total) / total * 100.0).abs(),
                errors.iter().sum::<f64>() / errors.len() as f64,
                errors.iter().copied().fold(0.0, f64::max)
            );
        }
    }
}

/// Blocks of the table that one reading of the lowest `shards` touches.
async fn explain(database: &mut PgConnection, shards: u32) -> f64 {
    let text: serde_json::Value = sqlx::query_scalar(AssertSqlSafe(format!(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
         SELECT tenant_id, count(*), sum(pg_column_size(value)) FROM queen.kv
          WHERE shard = ANY (ARRAY(SELECT generate_series(0, {shards} - 1)::smallint))
            AND queen.kv_live_v1(expires_at, now()) GROUP BY tenant_id"
    )))
    .fetch_one(database)
    .await
    .unwrap();
    let plan = &text[0]["Plan"];
    plan["Shared Hit Blocks"].as_f64().unwrap() + plan["Shared Read Blocks"].as_f64().unwrap()
}

/// (c): how long workers of autovacuum are at the table, in a load that goes on.
async fn autovacuum(stand: &Stand, window: Duration) {
    println!("\nautovacuum of queen.kv in a load that goes on, looked at each 20 ms for {window:?}");
    println!(
        "load          calls/s   workers busy   vacuums   of which ended a minute   dead rows at the end"
    );
    for load in [Load::Counters, Load::Lifetimes] {
        stand.install().await;
        drive(stand, load, Duration::from_secs(5)).await;
        let mut database = stand.connect("cell").await;
        let ended = format!("SELECT autovacuum_count {STATS}");
        let before = figure(&mut database, &ended).await;
        let mut watcher = stand.connect("cell").await;
        let watch = tokio::spawn(async move {
            let (end, mut looks, mut busy) = (Instant::now() + window, 0.0, 0.0);
            while Instant::now() < end {
                busy += figure(
                    &mut watcher,
                    "SELECT count(*) FROM pg_stat_activity
                      WHERE backend_type = 'autovacuum worker' AND query LIKE '%queen.kv%'
                        AND query NOT LIKE '%queen.kv\\_%'",
                )
                .await;
                looks += 1.0;
                sleep(Duration::from_millis(20)).await;
            }
            busy / looks * 100.0
        });
        let calls = drive(stand, load, window).await;
        let busy = watch.await.unwrap();
        let vacuums = settled(&mut database, &ended).await - before;
        let dead = figure(&mut database, &format!("SELECT n_dead_tup {STATS}")).await;
        println!(
            "{:12} {:8.0} {busy:12.1} % {vacuums:9.0} {:25.1} {dead:22.0}",
            format!("{load:?}"),
            calls / window.as_secs_f64(),
            vacuums * 60.0 / window.as_secs_f64()
        );
    }
}

fn number<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name)
        .ok()
        .map_or(default, |text| text.parse().ok().unwrap_or_else(|| panic!("{name}: a number")))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let window = Duration::from_secs(number("QUEEN_BENCH_SECONDS", 15));
    let largest = number("QUEEN_BENCH_ROWS", 10_000_000);
    let wanted: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|word| word == name);
    let stand = Stand::start().await;
    let mut database = stand.connect("cell").await;
    let version: String = sqlx::query_scalar("SHOW server_version").fetch_one(&mut database).await.unwrap();
    println!(
        "PostgreSQL {version}, its own settings but autovacuum_naptime = 1s, and synchronous_commit off for the loads"
    );
    if wants("fillfactor") {
        fillfactor(&stand, window).await;
    }
    if wants("usage") {
        usage(&stand, largest).await;
    }
    if wants("autovacuum") {
        autovacuum(&stand, window * 2).await;
    }
}
