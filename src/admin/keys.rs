//! `admin key`.

use super::{
    failure::Failure,
    input,
    plane::{Plane, Reference},
    report::{Report, members},
};
use crate::identity;
use clap::{Subcommand, builder::PossibleValuesParser};
use serde_json::{Value, json};
use sqlx::query_as;
use uuid::Uuid;

const SCOPES: [&str; 4] = ["produce", "consume", "admin", "read"];

#[derive(Subcommand, Debug)]
pub(super) enum KeyCommand {
    /// Make a key for a cluster and print it, this once
    Issue {
        /// The cluster's slug or id
        cluster: Reference,
        /// What the key is to be known by
        #[arg(long)]
        name: String,
        /// What it may do, separated by commas; `admin` does not imply the others
        #[arg(long, required = true, value_delimiter = ',', value_parser = PossibleValuesParser::new(SCOPES))]
        scopes: Vec<String>,
        /// The word after `qk_`, for people to tell keys apart
        #[arg(long, default_value = "live")]
        env: String,
    },
    /// Revoke a key for good
    Revoke {
        /// The key's id, as `key list` shows it
        key: String,
    },
    /// List a cluster's keys
    List {
        /// The cluster's slug or id
        cluster: Reference,
        /// Also those that are revoked
        #[arg(long)]
        all: bool,
    },
}

impl KeyCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        match self {
            Self::Issue { cluster, name, scopes, env } => issue(&cluster, &name, scopes, &env, plane).await,
            Self::Revoke { key } => {
                // Not parsed by clap, which would repeat the argument: it may be the key itself.
                let id = Uuid::parse_str(key.trim())
                    .map_err(|_| Failure::usage("a key is named by its id, as `key list` shows it"))?;
                plane.run(sqlx::query("SELECT queen_proxy.revoke_api_key($1)").bind(id)).await?;
                Ok(Report::new(json!({"key_id": id, "revoked": true}), format!("key {id} is revoked")))
            }
            Self::List { cluster, all } => {
                let cluster = plane.cluster(&cluster).await?;
                let list = query_as(include_str!("sql/list_keys.sql")).bind(cluster.id).bind(all);
                let keys: Value = plane.document(list).await?;
                let mut columns = vec!["key_id", "name", "scopes", "created_at", "last_used_at"];
                if all {
                    columns.push("revoked_at");
                }
                let text = members(&columns, &keys);
                let document = json!({"cluster_id": cluster.id, "cluster_slug": cluster.name, "keys": keys});
                Ok(Report::new(document, text))
            }
        }
    }
}

async fn issue(
    cluster: &Reference,
    name: &str,
    scopes: Vec<String>,
    env: &str,
    plane: &mut Plane,
) -> Result<Report, Failure> {
    // Whoever reads a key splits it at the underscores.
    let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    if env.is_empty() || env.len() > 16 || !env.bytes().all(fits) {
        return Err(Failure::usage("--env: must be 1 to 16 small letters and digits"));
    }
    let mut distinct: Vec<String> = Vec::new();
    for scope in scopes {
        if !distinct.contains(&scope) {
            distinct.push(scope);
        }
    }
    let cluster = plane.cluster(cluster).await?;
    let key = input::new_key(env)?;
    let call = query_as("SELECT queen_proxy.issue_api_key($1, $2, $3, $4)")
        .bind(cluster.id)
        .bind(name)
        .bind(hex::encode(identity::digest(key.expose())))
        .bind(&distinct);
    let id: Uuid = plane.value(call).await?;
    let text = format!(
        "{}\n\nThe key is shown this once. It is {id} of cluster {} and may {}.",
        key.expose(),
        cluster.name,
        distinct.join(", "),
    );
    let document = json!({
        "key_id": id, "cluster_id": cluster.id, "cluster_slug": cluster.name, "name": name.trim(),
        "scopes": distinct, "api_key": key.expose(),
    });
    Ok(Report::new(document, text))
}
