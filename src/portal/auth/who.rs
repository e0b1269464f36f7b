//! `GET /auth/me`: who is asking, and what they can act on (proxy contract §6).

use super::{Auth, AuthRefusal, Visit};
use crate::{
    domain::{
        cluster::{ApiKey, Cluster, Principal},
        status::Restriction,
    },
    identity::{ACT_HEADER, AuthError, Credential, Identity, credential},
    portal::Reply,
};
use http::{HeaderMap, header::AUTHORIZATION};
use serde_json::{Value, json};
use std::sync::Arc;

/// The cluster that the request acts on, and as whom: what the data plane would say.
pub type Acting = (Arc<Cluster>, Principal);

/// The session cookies; a bearer is none.
pub(super) fn cookies<'h>(headers: &'h HeaderMap, identity: &Identity) -> Option<Vec<&'h str>> {
    match credential(headers, &identity.cookies) {
        Credential::Session(tokens) if !headers.contains_key(AUTHORIZATION) => Some(tokens),
        _ => None,
    }
}

impl Auth {
    /// Whether the caller presents a key: then what the data plane refuses is refused here too.
    pub fn is_key(&self, headers: &HeaderMap) -> bool {
        matches!(credential(headers, &self.identity.cookies), Credential::ApiKey(_))
    }

    /// `GET /auth/me`.
    pub async fn me(&self, visit: &Visit<'_>, acting: Option<Acting>) -> Result<Reply, AuthRefusal> {
        match acting {
            Some((cluster, Principal::ApiKey(key))) => Ok(Reply::json(&self.of_key(&cluster, &key))),
            acting => self.of_session(visit, acting).await,
        }
    }

    async fn of_session(&self, visit: &Visit<'_>, acting: Option<Acting>) -> Result<Reply, AuthRefusal> {
        let session = self.session(visit).await?;
        let account = self.identity.control.account(session.user, self.identity.operators).await;
        let account = account.map_err(|error| {
            tracing::warn!(%error, "an account cannot be shown");
            AuthRefusal::Unavailable
        })?;
        let account = account.ok_or(AuthRefusal::Auth(AuthError::UserGone))?;
        let mut me: Value = serde_json::from_str(&account).map_err(|_| AuthRefusal::Internal)?;
        let role = acting.as_ref().and_then(|(_, principal)| match principal {
            Principal::Person(person) => Some(person.role.word()),
            _ => None,
        });
        me["operator_enabled"] = json!(self.identity.operators);
        me["operator_live"] = json!(self.identity.operators && me["is_operator"] == true);
        me["acting_cluster"] = acting.map_or(Value::Null, |(cluster, _)| named(&cluster));
        me["act_cluster_header"] = json!(ACT_HEADER);
        // What counts on the cluster acted on; what the token says of roles is not believed.
        me["role"] = json!(role);
        me["cluster"] = json!(session.cluster.map(|id| id.0));
        Ok(Reply::json(&me))
    }

    fn of_key(&self, cluster: &Cluster, key: &ApiKey) -> Value {
        let status = match cluster.restriction {
            Restriction::None => "active",
            _ => "push_blocked",
        };
        json!({
            "user_id": null,
            "email": null,
            "tenant_slug": null,
            "is_operator": false,
            "operator_enabled": self.identity.operators,
            "operator_live": false,
            "acting_cluster": named(cluster),
            "clusters": [{
                "id": cluster.id.0,
                "slug": cluster.slug.as_str(),
                "role": null,
                "tenant_slug": null,
                "tenant_id": cluster.tenant.0,
                "status": status,
                "cell_slug": null,
            }],
            "act_cluster_header": ACT_HEADER,
            "role": null,
            "cluster": cluster.id.0,
            "principal": "api_key",
            "key_id": key.id.0,
            "scopes": {
                "produce": key.scopes.produce,
                "consume": key.scopes.consume,
                "admin": key.scopes.admin,
                "read": key.scopes.read,
            },
        })
    }
}

fn named(cluster: &Cluster) -> Value {
    json!({ "id": cluster.id.0, "slug": cluster.slug.as_str() })
}
