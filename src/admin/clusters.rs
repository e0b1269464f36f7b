//! `admin cluster`.

use super::{
    failure::Failure,
    plane::{Plane, Reference},
    report::Report,
    show,
};
use crate::domain::limits::Limits;
use clap::{Subcommand, builder::PossibleValuesParser};
use serde_json::{Map, Value, json};
use sqlx::{query_as, types::Json};
use std::str::FromStr;
use uuid::Uuid;

const STATUSES: [&str; 4] = ["active", "push_blocked", "suspended", "deleting"];

#[derive(Subcommand, Debug)]
pub(super) enum ClusterCommand {
    /// Create a cluster of a tenant
    Create {
        /// The tenant's slug or id
        tenant: Reference,
        /// Slug of the cluster, which is the subdomain
        slug: String,
        /// Code of its plan
        #[arg(long)]
        plan: String,
        /// Slug or id of its cell
        #[arg(long)]
        cell: Reference,
    },
    /// Set a cluster's own status; the worse of it and the tenant's counts
    Status {
        /// Slug or id
        cluster: Reference,
        /// `push_blocked`: no pushes; `suspended` and `deleting`: nothing at all
        #[arg(value_parser = PossibleValuesParser::new(STATUSES))]
        status: String,
    },
    /// Put a cluster on another plan; its overrides stay
    Plan {
        /// Slug or id
        cluster: Reference,
        /// Code of the plan
        plan: String,
    },
    /// Override limits of a cluster's plan; overrides that are not named stay as they are
    #[command(after_help = limit_names())]
    Limits {
        /// Slug or id
        cluster: Reference,
        /// NAME=NUMBER, NAME=unlimited, or NAME=plan to end the override (0 denies)
        #[arg(value_name = "NAME=VALUE", required_unless_present = "clear")]
        limits: Vec<Override>,
        /// End all overrides first
        #[arg(long)]
        clear: bool,
    },
    /// Show status, plan, limits and where each comes from, features, cell and keys
    Show {
        /// Slug or id
        cluster: Reference,
    },
}

fn limit_names() -> String {
    format!("Limits:\n  {}", Limits::NAMES.join("\n  "))
}

/// One `NAME=VALUE`.
#[derive(Clone, Debug)]
pub(super) struct Override {
    name: &'static str,
    to: To,
}

#[derive(Clone, Debug)]
enum To {
    Plan,
    Unlimited,
    Number(i64),
}

impl FromStr for Override {
    type Err = String;

    /// Readers ignore a name or value they do not know, so a slip would pass without any effect.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("must be NAME=VALUE")?;
        let name = Limits::NAMES.iter().find(|known| **known == name);
        let name = name.ok_or("there is no limit of this name (see --help)")?;
        let to = match value {
            "plan" => To::Plan,
            "unlimited" => To::Unlimited,
            number => match number.parse() {
                Ok(number) if number >= 0 => To::Number(number),
                _ => return Err("the value must be a whole number from 0, `unlimited` or `plan`".to_owned()),
            },
        };
        Ok(Self { name, to })
    }
}

impl ClusterCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        match self {
            Self::Create { tenant, slug, plan, cell } => {
                let tenant = plane.tenant(&tenant).await?;
                let cell = plane.cell(&cell).await?;
                // The slug as it was stored: the function writes it in its own way.
                let call = query_as(include_str!("sql/create_cluster.sql"))
                    .bind(tenant.id)
                    .bind(&slug)
                    .bind(&plan)
                    .bind(cell.id);
                let id: Uuid = plane.value(call).await?;
                let cluster = plane.cluster(&Reference::from(id)).await?;
                let text = format!("cluster {} ({id}) on plan {plan} in cell {}", cluster.name, cell.name);
                let document = json!({
                    "cluster_id": id, "cluster_slug": cluster.name, "tenant_id": tenant.id,
                    "tenant_slug": tenant.name, "plan": plan, "cell_id": cell.id, "cell_slug": cell.name,
                });
                Ok(Report::new(document, text))
            }
            Self::Status { cluster, status } => {
                let cluster = plane.cluster(&cluster).await?;
                let set = sqlx::query("SELECT queen_proxy.set_cluster_status($1, $2)");
                plane.run(set.bind(cluster.id).bind(&status)).await?;
                let text = format!("cluster {} is {status}", cluster.name);
                let document =
                    json!({"cluster_id": cluster.id, "cluster_slug": cluster.name, "status": status});
                Ok(Report::new(document, text))
            }
            Self::Plan { cluster, plan } => {
                let cluster = plane.cluster(&cluster).await?;
                let set = sqlx::query("SELECT queen_proxy.assign_plan($1, $2)");
                plane.run(set.bind(cluster.id).bind(&plan)).await?;
                let text = format!("cluster {} is on plan {plan}", cluster.name);
                let document = json!({"cluster_id": cluster.id, "cluster_slug": cluster.name, "plan": plan});
                Ok(Report::new(document, text))
            }
            Self::Limits { cluster, limits, clear } => override_limits(&cluster, &limits, clear, plane).await,
            Self::Show { cluster } => show::show(&cluster, plane).await,
        }
    }
}

async fn override_limits(
    cluster: &Reference,
    limits: &[Override],
    clear: bool,
    plane: &mut Plane,
) -> Result<Report, Failure> {
    let mut set = Map::new();
    let mut ended = Vec::new();
    for Override { name, to } in limits {
        let twice = ended.contains(name) || set.contains_key(*name);
        if twice {
            return Err(Failure::Usage(format!("{name}: given twice")));
        }
        match to {
            To::Plan => ended.push(*name),
            To::Unlimited => drop(set.insert((*name).to_owned(), Value::Null)),
            To::Number(number) => drop(set.insert((*name).to_owned(), json!(number))),
        }
    }
    let cluster = plane.cluster(cluster).await?;
    let call =
        query_as(include_str!("sql/set_limits.sql")).bind(cluster.id).bind(clear).bind(Json(set)).bind(ended);
    let Some((Json(overrides),)) = plane.find::<(Json<Value>,)>(call).await? else {
        return Err(Failure::Missing("cluster"));
    };
    let text = match overrides.as_object() {
        Some(all) if !all.is_empty() => {
            let line = |(name, value): (&String, &Value)| match value {
                Value::Null => format!("  {name}=unlimited\n"),
                value => format!("  {name}={value}\n"),
            };
            let lines: String = all.iter().map(line).collect();
            format!("cluster {} overrides its plan by\n{lines}", cluster.name)
        }
        _ => format!("cluster {} has its plan's limits", cluster.name),
    };
    let document = json!({
        "cluster_id": cluster.id, "cluster_slug": cluster.name, "limit_overrides": overrides,
    });
    Ok(Report::new(document, text))
}

#[cfg(test)]
mod tests {
    use super::{Override, To};

    #[test]
    fn overrides_as_arguments() {
        for (text, want) in [
            ("max_queues=500", "Number(500)"),
            ("max_queues=0", "Number(0)"),
            ("monthly_msgs_quota=9223372036854775807", "Number(9223372036854775807)"),
            ("req_burst=unlimited", "Unlimited"),
            ("req_burst=plan", "Plan"),
        ] {
            let Override { name, to } = text.parse().unwrap();
            assert_eq!((format!("{to:?}").as_str(), text.starts_with(name)), (want, true), "{text}");
            assert!(matches!(to, To::Plan | To::Unlimited | To::Number(_)));
        }
        for text in [
            "max_queues",
            "max_queues=",
            "max_queues=-1",
            "max_queues=1.5",
            "max_queues=null",
            "max_queues=9223372036854775808",
            "MAX_QUEUES=1",
            "queues=1",
            "=1",
            "",
        ] {
            assert!(text.parse::<Override>().is_err(), "{text}");
        }
    }
}
