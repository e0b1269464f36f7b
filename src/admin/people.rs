//! `admin user` and `admin session`.

use super::{
    failure::Failure,
    input::PasswordSource,
    plane::{Plane, Reference},
    report::Report,
};
use crate::domain::secret::Secret;
use clap::{Subcommand, builder::PossibleValuesParser};
use serde_json::json;
use sqlx::query_as;
use uuid::Uuid;

const PROVIDERS: [&str; 3] = ["local", "google", "github"];
/// The roles, and the word for having none.
const ROLES: [&str; 5] = ["admin", "producer", "consumer", "viewer", NO_ROLE];
const NO_ROLE: &str = "none";
/// The end of the year 9999.
const LAST_SECOND: i64 = 253_402_300_799;

#[derive(Subcommand, Debug)]
pub(super) enum UserCommand {
    /// Create a person of a tenant
    Create {
        /// The tenant's slug or id
        tenant: Reference,
        /// What they sign in with
        email: String,
        #[command(flatten)]
        password: PasswordSource,
        /// Where they come from; for the audit
        #[arg(long, default_value = "local", value_parser = PossibleValuesParser::new(PROVIDERS))]
        provider: String,
    },
    /// Give a person a role on a cluster of their tenant, in place of the one they have
    Role {
        /// The cluster's slug or id
        cluster: Reference,
        /// The person's email
        email: String,
        /// `none` takes the role away
        #[arg(value_parser = PossibleValuesParser::new(ROLES))]
        role: String,
    },
    /// Make a person an operator, or an ordinary one again
    Operator {
        /// The person's email
        email: String,
        #[arg(value_parser = PossibleValuesParser::new(["on", "off"]))]
        switch: String,
    },
}

impl UserCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        match self {
            Self::Create { tenant, email, password, provider } => {
                let password = password.read()?;
                let tenant = plane.tenant(&tenant).await?;
                let call = query_as(include_str!("sql/create_user.sql"))
                    .bind(tenant.id)
                    .bind(&email)
                    .bind(password.as_ref().map(Secret::expose))
                    .bind(&provider);
                let id: Uuid = plane.value(call).await?;
                let user = plane.user(&Reference::from(id)).await?;
                let text = format!("user {} ({id}) of tenant {}", user.name, tenant.name);
                let document = json!({
                    "user_id": id, "email": user.name, "tenant_id": tenant.id, "tenant_slug": tenant.name,
                    "password_set": password.is_some(),
                });
                Ok(Report::new(document, text))
            }
            Self::Role { cluster, email, role } => set_role(&cluster, &email, &role, plane).await,
            Self::Operator { email, switch } => {
                let on = switch == "on";
                let set = sqlx::query("SELECT queen_proxy.set_operator($1, $2)");
                plane.run(set.bind(&email).bind(on)).await?;
                let email = as_stored(&email);
                let text = format!("{email} is {} operator", if on { "an" } else { "no" });
                Ok(Report::new(json!({"email": email, "is_operator": on}), text))
            }
        }
    }
}

/// An email in the functions' spelling.
fn as_stored(email: &str) -> String {
    email.trim().to_lowercase()
}

async fn set_role(
    cluster: &Reference,
    email: &str,
    role: &str,
    plane: &mut Plane,
) -> Result<Report, Failure> {
    let cluster = plane.cluster(cluster).await?;
    let given = (role != NO_ROLE).then_some(role);
    let call = match given {
        Some(role) => sqlx::query("SELECT queen_proxy.grant_cluster_role($1, $2, $3)")
            .bind(cluster.id)
            .bind(email)
            .bind(role),
        None => sqlx::query("SELECT queen_proxy.revoke_cluster_role($1, $2)").bind(cluster.id).bind(email),
    };
    plane.run(call).await?;
    let email = as_stored(email);
    let text = match given {
        Some(role) => format!("{email} is {role} on cluster {}", cluster.name),
        None => format!("{email} has no role on cluster {}", cluster.name),
    };
    let document = json!({
        "cluster_id": cluster.id, "cluster_slug": cluster.name, "email": email, "role": given,
    });
    Ok(Report::new(document, text))
}

#[derive(Subcommand, Debug)]
pub(super) enum SessionCommand {
    /// End a session before it expires
    Revoke {
        /// The session's id (`jti`)
        jti: String,
        /// Whose session it is: email or id
        #[arg(long)]
        user: Reference,
        /// When it would have expired (`exp`): seconds since 1970, or 2026-01-31T12:00:00Z
        #[arg(long, value_name = "TIME")]
        expires_at: String,
    },
}

impl SessionCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        let Self::Revoke { jti, user, expires_at } = self;
        // The id ends up in the audit; a token has no business there.
        if jti.matches('.').count() == 2 && jti.trim_start().starts_with("eyJ") {
            return Err(Failure::usage("a session is named by its id, the `jti` claim, not by its token"));
        }
        let expires_at = expires_at.trim();
        let seconds = expires_at.parse::<i64>().ok().filter(|seconds| (0..=LAST_SECOND).contains(seconds));
        if seconds.is_none() && !is_timestamp(expires_at) {
            return Err(Failure::usage(
                "--expires-at: must be seconds since 1970 or like 2026-01-31T12:00:00Z",
            ));
        }
        let user = plane.user(&user).await?;
        let call = query_as(include_str!("sql/revoke_session.sql"))
            .bind(&jti)
            .bind(seconds)
            .bind(seconds.is_none().then_some(expires_at))
            .bind(user.id);
        let expires: String = plane.value(call).await?;
        let text =
            format!("session {} of {} is revoked; it would have expired at {expires}", jti.trim(), user.name);
        let document =
            json!({"jti": jti.trim(), "user_id": user.id, "email": user.name, "expires_at": expires});
        Ok(Report::new(document, text))
    }
}

/// The form of RFC 3339. PostgreSQL would also take `tomorrow`, and a time without zone as it likes;
/// which days a month has is left to it.
fn is_timestamp(text: &str) -> bool {
    let Some((at, zone)) = text.split_at_checked(19) else {
        return false;
    };
    let form = |text: &str, form: &str| {
        text.len() == form.len()
            && text
                .bytes()
                .zip(form.bytes())
                .all(|(b, f)| if f == b'0' { b.is_ascii_digit() } else { b == f })
    };
    let zone = match zone.strip_prefix('.') {
        None => zone,
        Some(rest) => {
            let fraction = rest.bytes().take_while(u8::is_ascii_digit).count();
            if fraction == 0 {
                return false;
            }
            &rest[fraction..]
        }
    };
    let zoned = zone == "Z" || form(zone, "+00:00") || form(zone, "-00:00");
    form(at, "0000-00-00T00:00:00") && zoned
}

#[cfg(test)]
mod tests {
    use super::is_timestamp;

    #[test]
    fn timestamps() {
        for yes in [
            "2026-01-31T12:00:00Z",
            "2026-01-31T12:00:00.5Z",
            "2026-01-31T12:00:00+02:00",
            "2026-01-31T12:00:00.123456-11:30",
        ] {
            assert!(is_timestamp(yes), "{yes}");
        }
        for no in [
            "",
            "tomorrow",
            "infinity",
            "2026-01-31",
            "2026-01-31T12:00:00",
            "2026-01-31 12:00:00Z",
            "2026-01-31T12:00:00.Z",
            "2026-01-31T12:00:00+2",
            "2026-01-31T12:00:00Z; DROP",
            "2026-01-31T12:00:0äZ",
        ] {
            assert!(!is_timestamp(no), "{no}");
        }
    }
}
