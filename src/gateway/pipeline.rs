//! The order of the checks (D3). Read [`Pipeline::admit`] from top to bottom: a stranger learns
//! nothing but whether a host exists and whether a route does.

use super::{
    body::{Inspection, Subject},
    forward::{Forward, budget},
    head::{self, Target},
    refusal::Refusal,
};
use crate::{
    config::proxy::Timeouts,
    control::ControlPlane,
    domain::{
        cluster::{Cluster, Principal},
        features::Feature,
        lookup::Lookup,
        slug::Slug,
        status::Restriction,
    },
    identity,
    policy::{
        authorize,
        host::slug_of_host,
        path,
        route::{self, Effect, RouteClass},
    },
};
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH};
use pingora::http::RequestHeader;
use std::sync::Arc;

/// Where clusters and keys come from.
#[derive(Clone)]
pub enum Directory {
    /// The control plane.
    Control(ControlPlane),
    /// One synthetic cluster for every host; keys are not known, so only a proxy that does not
    /// authenticate can serve it.
    Static(Arc<Cluster>),
}

/// The checks and what they need.
pub struct Pipeline {
    /// Clusters and keys.
    pub directory: Directory,
    /// The cluster of hosts that name none.
    pub default_cluster: Option<Slug>,
    /// Everybody is a key with all scopes.
    pub dev_insecure: bool,
    /// Largest body that is inspected.
    pub max_body_bytes: usize,
    /// Budgets.
    pub timeouts: Timeouts,
}

/// A request that passed, and what its body still has to pass.
pub struct Admitted {
    pub(super) forward: Forward,
    pub(super) inspection: Option<Inspection>,
}

impl Pipeline {
    /// Every check of a data-plane request whose framing is sound, in order.
    pub async fn admit(&self, head: &RequestHeader) -> Result<Admitted, Refusal> {
        let cluster = self.resolve(head::host(head)).await?;
        let (target, class) = classify(head)?;
        let principal = self.authenticate(head, &cluster).await?;
        if cluster.restriction.is_suspended() {
            return Err(Refusal::Suspended);
        }
        let is_kv_batch = class == RouteClass::Gated(Feature::Kv, Effect::Mixed);
        let feature_gated = is_gated(&cluster, class);
        if feature_gated && !is_kv_batch {
            return Err(Refusal::FeatureGated);
        }
        if !may(&principal, class) {
            return Err(Refusal::NotPermitted);
        }
        let push_blocked = cluster.restriction == Restriction::PushBlocked;
        if push_blocked && grows(class) {
            return Err(Refusal::PushBlocked);
        }
        let inspection = self.inspection(head, class, &principal, feature_gated, push_blocked)?;
        let budget = budget(target, &self.timeouts);
        Ok(Admitted { forward: Forward { cluster, principal, budget }, inspection })
    }

    async fn resolve(&self, host: Option<&str>) -> Result<Arc<Cluster>, Refusal> {
        let control = match &self.directory {
            Directory::Static(cluster) => return Ok(Arc::clone(cluster)),
            Directory::Control(control) => control,
        };
        let named = host.and_then(slug_of_host);
        for slug in [named, self.default_cluster].into_iter().flatten() {
            match control.cluster(slug).await {
                Lookup::Found(cluster) => return Ok(cluster),
                // A host whose cluster cannot be looked up must not end in another cluster.
                Lookup::Unavailable => return Err(Refusal::UnknownCluster),
                Lookup::Absent => {}
            }
        }
        Err(Refusal::UnknownCluster)
    }

    async fn authenticate(&self, head: &RequestHeader, cluster: &Cluster) -> Result<Principal, Refusal> {
        if self.dev_insecure {
            return Ok(Principal::Anyone);
        }
        match &self.directory {
            Directory::Control(control) => {
                identity::authenticate(&head.headers, cluster, control).await.map_err(Refusal::Auth)
            }
            Directory::Static(_) => Err(Refusal::Auth(match identity::credential(&head.headers) {
                identity::Credential::None => identity::AuthError::Missing,
                identity::Credential::ApiKey(_) => identity::AuthError::UnknownKey,
                identity::Credential::Session(_) => identity::AuthError::Invalid,
            })),
        }
    }

    /// What a body that may both read and add must still pass. On a plain, unblocked cluster it is
    /// not read at all.
    fn inspection(
        &self,
        head: &RequestHeader,
        class: RouteClass,
        principal: &Principal,
        feature_gated: bool,
        push_blocked: bool,
    ) -> Result<Option<Inspection>, Refusal> {
        let RouteClass::Gated(feature, Effect::Mixed) = class else {
            return Ok(None);
        };
        // Refused whether or not it is read now: what a client may send must not depend on its status.
        let mut codings = head.headers.get_all(CONTENT_ENCODING).iter();
        if codings.any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Err(Refusal::EncodedBody);
        }
        if !feature_gated && !push_blocked {
            return Ok(None);
        }
        let length = head.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: usize| length > self.max_body_bytes) {
            return Err(Refusal::BodyTooLarge);
        }
        let subject = match feature {
            Feature::Streams => Subject::Cycle,
            _ => Subject::Batch {
                feature_gated,
                facade_may_pass: feature == Feature::Kv && may(principal, RouteClass::Consume),
            },
        };
        Ok(Some(Inspection { subject, ceiling: self.max_body_bytes }))
    }
}

/// The class of a route that is open to tenants. Operator routes need a live operator, which a key
/// never is; the refusal is the one of a blocked route.
fn classify(head: &RequestHeader) -> Result<(Target<'_>, RouteClass), Refusal> {
    let target = head::target(head).filter(|t| path::is_canonical(t.path) && route::is_data_plane(t.path));
    let target = target.ok_or(Refusal::RouteBlocked)?;
    match route::classify(&head.method, target.path) {
        RouteClass::Blocked | RouteClass::Operator => Err(Refusal::RouteBlocked),
        class => Ok((target, class)),
    }
}

fn is_gated(cluster: &Cluster, class: RouteClass) -> bool {
    matches!(class, RouteClass::Gated(feature, _) if !cluster.features.contains(feature))
}

fn may(principal: &Principal, class: RouteClass) -> bool {
    match principal {
        Principal::ApiKey(key) => authorize::key_may(key.scopes, class),
        Principal::Anyone => authorize::key_may(crate::domain::scopes::Scopes::all(), class),
    }
}

/// Whether every request of this class adds to what the tenant keeps.
fn grows(class: RouteClass) -> bool {
    matches!(
        class,
        RouteClass::Produce | RouteClass::QueueAdmin { replays: true } | RouteClass::Gated(_, Effect::Grow)
    )
}
