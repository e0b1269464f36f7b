//! `admin tenant`.

use super::{
    failure::Failure,
    input::PasswordSource,
    plane::{Plane, Reference},
    report::{Report, table, word},
};
use crate::domain::secret::Secret;
use clap::{Args, Subcommand, builder::PossibleValuesParser};
use serde_json::{Value, json};
use sqlx::query_as;

const STATUSES: [&str; 4] = ["active", "grace", "suspended", "deleting"];

#[derive(Subcommand, Debug)]
pub(super) enum TenantCommand {
    /// Create a tenant, its cluster, its admin and a first key; repeating it finds them again
    Bootstrap(Bootstrap),
    /// Set a tenant's status, which covers all of its clusters
    Status {
        /// Slug or id
        tenant: Reference,
        /// grace: no pushes; suspended and deleting: nothing at all
        #[arg(value_parser = PossibleValuesParser::new(STATUSES))]
        status: String,
    },
    /// Delete a tenant for good. Set its status to `deleting` and purge its data in the cells before:
    /// the names it has there are printed once and are nowhere else afterwards
    Delete {
        /// Slug or id; by id, a tenant that is gone already is no failure
        tenant: Reference,
        /// Whatever its status is
        #[arg(long)]
        force: bool,
    },
}

#[derive(Args, Debug)]
pub(super) struct Bootstrap {
    /// Slug of the tenant
    slug: String,
    /// Name of the tenant [default: its slug]
    #[arg(long)]
    name: Option<String>,
    /// Slug of its cluster, which is the subdomain
    #[arg(long, value_name = "SLUG")]
    cluster: String,
    /// Code of the cluster's plan
    #[arg(long)]
    plan: String,
    /// Slug or id of the cluster's cell
    #[arg(long)]
    cell: Reference,
    /// The admin's email
    #[arg(long)]
    email: String,
    #[command(flatten)]
    password: PasswordSource,
    /// Name of the first key; one that is not revoked is kept
    #[arg(long, default_value = "default")]
    key_name: String,
}

impl TenantCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        match self {
            Self::Bootstrap(arguments) => bootstrap(arguments, plane).await,
            Self::Status { tenant, status } => {
                let tenant = plane.tenant(&tenant).await?;
                let set = sqlx::query("SELECT queen_proxy.set_tenant_status($1, $2)");
                plane.run(set.bind(tenant.id).bind(&status)).await?;
                let text = format!("tenant {} is {status}", tenant.name);
                let document = json!({"tenant_id": tenant.id, "tenant_slug": tenant.name, "status": status});
                Ok(Report::new(document, text))
            }
            Self::Delete { tenant, force } => {
                let id = match tenant.id() {
                    // The function knows best what to say of one that is gone.
                    Some(id) => id,
                    None => plane.tenant(&tenant).await?.id,
                };
                let delete = query_as("SELECT queen_proxy.delete_tenant($1, $2)").bind(id).bind(force);
                let document: Value = plane.document(delete).await?;
                let text = deleted(&document);
                Ok(Report::new(document, text))
            }
        }
    }
}

async fn bootstrap(arguments: Bootstrap, plane: &mut Plane) -> Result<Report, Failure> {
    let password = arguments.password.read()?;
    let cell = plane.cell(&arguments.cell).await?;
    let call = query_as("SELECT queen_proxy.bootstrap_tenant($1, $2, $3, $4, $5, $6, $7, $8)")
        .bind(&arguments.slug)
        .bind(&arguments.name)
        .bind(&arguments.cluster)
        .bind(&arguments.plan)
        .bind(cell.id)
        .bind(&arguments.email)
        .bind(password.as_ref().map(Secret::expose))
        .bind(&arguments.key_name);
    let made: Value = plane.document(call).await?;
    let key = match &made["api_key"] {
        Value::String(key) => format!("{key}\n\nThe key is shown this once."),
        _ => "issued before, and not readable any more".to_owned(),
    };
    let mut text = format!(
        "tenant   {}\ncluster  {}\nadmin    {}\nkey      {key}\n",
        word(&made["tenant_id"]),
        word(&made["cluster_id"]),
        word(&made["user_id"]),
    );
    if made["can_login"] == false {
        text.push_str("The admin has neither a password nor a linked identity and cannot sign in yet.\n");
    }
    Ok(Report::new(made, text))
}

fn deleted(document: &Value) -> String {
    if document["deleted"] != true {
        return "there is no such tenant any more".to_owned();
    }
    let clusters: Vec<Vec<String>> = document["clusters"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|cluster| ["slug", "cell_id", "broker_tenant_uuid"].map(|name| word(&cluster[name])).into())
        .collect();
    let mut text = format!("tenant {} is deleted\n", word(&document["tenant_slug"]));
    if !clusters.is_empty() {
        text.push_str("its clusters, and what each was called in its cell:\n");
        text.push_str(&table(&["cluster", "cell", "broker_tenant"], &clusters));
    }
    text
}
