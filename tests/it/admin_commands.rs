//! `queen-proxy admin` as an operator and a script use it: the real program against a control plane of
//! its own, what it prints, what it changes, and how it ends.

mod cells;
mod clusters;
mod failures;
mod keys;
mod limits;
mod outbox;
mod people;
mod tenants;

use crate::support::World;
use serde_json::Value;
use std::{
    io::Write,
    process::{Command, Stdio},
};

const ID: usize = 36;

/// How one run of the program ended.
struct Ran {
    code: i32,
    out: String,
    err: String,
}

/// The program with its environment.
struct Admin {
    environment: Vec<(String, String)>,
}

impl Admin {
    /// For the control plane of this world.
    fn of(world: &World) -> Self {
        Self { environment: world.proxy_environment(1) }
    }

    /// A control plane that is up to date, without any proxy, and with the cell `shared-a`.
    async fn alone() -> (World, Self) {
        let world = World::builder().proxies(0).recorder().start().await;
        let admin = Self::of(&world);
        assert_eq!(admin.program(&["migrate"], "").code, 0);
        admin.ok(&[
            "cell",
            "add",
            "shared-a",
            "--region",
            "eu1",
            "--base-url",
            "http://10.0.3.11:6632",
            "--class",
            "shared",
        ]);
        (world, admin)
    }

    fn program(&self, arguments: &[&str], input: &str) -> Ran {
        let mut child = Command::new(env!("CARGO_BIN_EXE_queen-proxy"))
            .args(arguments)
            .env_clear()
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A program that does not read its input may be gone already.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let ran = Ran {
            code: output.status.code().expect("an exit code"),
            out: text(output.stdout),
            err: text(output.stderr),
        };
        assert!(!ran.err.contains("panicked"), "{arguments:?}: {}", ran.err);
        ran
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        self.run_with(arguments, "")
    }

    fn run_with(&self, arguments: &[&str], input: &str) -> Ran {
        self.program(&[&["admin"], arguments].concat(), input)
    }

    /// What it prints when it is done.
    fn ok(&self, arguments: &[&str]) -> String {
        let ran = self.run(arguments);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{arguments:?}: {}", ran.out);
        ran.out
    }

    /// The one document it prints with `--json`.
    fn json(&self, arguments: &[&str]) -> Value {
        let out = self.ok(&[arguments, &["--json"]].concat());
        assert_eq!(out.lines().count(), 1, "{out}");
        serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
    }

    /// The line with which it ends without having done anything.
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        self.fails_with(code, arguments, "")
    }

    fn fails_with(&self, code: i32, arguments: &[&str], input: &str) -> String {
        let ran = self.run_with(arguments, input);
        assert_eq!((ran.code, ran.out.as_str()), (code, ""), "{arguments:?}: {}", ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{arguments:?}: {}", ran.err);
        ran.err.trim_end().strip_prefix("queen-proxy: ").expect("the program's name").to_owned()
    }

    /// A tenant `acme` with the cluster `acme-prod` in the given cell.
    fn acme(&self, cell: &str) -> Value {
        self.json(&[
            "tenant",
            "bootstrap",
            "acme",
            "--cluster",
            "acme-prod",
            "--plan",
            "pro",
            "--cell",
            cell,
            "--email",
            "ops@acme.example",
        ])
    }
}

/// A member that has to be a text.
fn text<'a>(document: &'a Value, name: &str) -> &'a str {
    document[name].as_str().unwrap_or_else(|| panic!("{name} is no text in {document}"))
}

/// The one value of a query, as text.
async fn query(world: &World, query: &str) -> String {
    let query = sqlx::AssertSqlSafe(format!("SELECT ({query})::text"));
    let value: Option<String> =
        sqlx::query_scalar(query).fetch_one(&mut world.control().await).await.unwrap();
    value.unwrap_or_else(|| "NULL".to_owned())
}

/// Every row of the control plane as one text.
async fn everything(world: &World) -> String {
    query(world, "SELECT string_agg(x, '') FROM (SELECT query_to_xml('SELECT * FROM queen_proxy.' || relname, true, true, '')::text AS x FROM pg_class WHERE relkind = 'r' AND relnamespace = 'queen_proxy'::regnamespace) AS t").await
}

/// Actions in the audit, oldest first.
async fn audit(world: &World) -> Vec<String> {
    let query = "SELECT action FROM queen_proxy.operations ORDER BY at";
    sqlx::query_scalar(query).fetch_all(&mut world.control().await).await.unwrap()
}
