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
    identity::{ACT_HEADER, AuthError, Identity},
    policy::{
        authorize,
        host::{canonical_host, slug_of_host},
        path,
        route::{self, Effect, RouteClass},
    },
};
use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH};
use pingora::http::RequestHeader;
use std::{collections::HashSet, sync::Arc};

/// Where clusters and callers are looked up.
pub enum Directory {
    /// The control plane.
    Control(Arc<Identity>),
    /// One synthetic cluster for every host; keys are not known, so only a proxy that does not
    /// authenticate can serve it.
    Static(Arc<Cluster>),
}

/// The checks and what they need.
pub struct Pipeline {
    /// Clusters, keys, sessions.
    pub directory: Directory,
    /// The cluster of hosts that name none.
    pub default_cluster: Option<Slug>,
    /// Hosts, canonical and in lower case, on which the credential names the cluster. When there is
    /// any, strangers do not hear either which of the other hosts exist.
    pub shared_hosts: HashSet<String>,
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

/// What a request is for.
#[derive(Clone, Copy)]
enum Surface {
    /// A route of the cell.
    Data,
    /// Our own answer to who is asking.
    Who,
}

/// Who asks for what, on which cluster.
struct Identified<'r> {
    cluster: Arc<Cluster>,
    principal: Principal,
    target: Target<'r>,
    class: RouteClass,
}

impl Pipeline {
    /// Every check of a data-plane request whose framing is sound, in order.
    pub async fn admit(&self, head: &RequestHeader) -> Result<Admitted, Refusal> {
        let Identified { cluster, principal, target, class } = self.identify(head, Surface::Data).await?;
        if class == RouteClass::Operator && !may(&principal, class) {
            return Err(Refusal::RouteBlocked);
        }
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

    /// On which cluster a request would act, and as whom.
    pub async fn who(&self, head: &RequestHeader) -> Result<(Arc<Cluster>, Principal), Refusal> {
        let Identified { cluster, principal, .. } = self.identify(head, Surface::Who).await?;
        if cluster.restriction.is_suspended() { Err(Refusal::Suspended) } else { Ok((cluster, principal)) }
    }

    /// Resolve, classify, authenticate. Where the host names the cluster it is resolved first; where the
    /// credential or a header names it, only after the credential has been judged.
    async fn identify<'r>(
        &self,
        head: &'r RequestHeader,
        surface: Surface,
    ) -> Result<Identified<'r>, Refusal> {
        let identity = match &self.directory {
            Directory::Control(identity) => identity,
            Directory::Static(cluster) => return self.identify_static(head, surface, cluster),
        };
        let host = head::host(head);
        let act = head.headers.get(ACT_HEADER);
        if act.is_none() && !self.is_shared(host) {
            let cluster = match self.resolve(&identity.control, host).await {
                Ok(cluster) => cluster,
                Err(unknown) if self.shared_hosts.is_empty() => return Err(unknown),
                Err(unknown) => {
                    let (_, class) = classify(head, surface, identity.operators)?;
                    let live = Box::pin(identity.is_live(&head.headers)).await;
                    live.map_err(|error| refusal_of(error, class))?;
                    // Where there is no cluster nobody is an operator of its cell either.
                    return Err(if class == RouteClass::Operator { Refusal::RouteBlocked } else { unknown });
                }
            };
            let (target, class) = classify(head, surface, identity.operators)?;
            let principal = if self.dev_insecure {
                Principal::Anyone
            } else {
                let principal = identity.authenticate(&head.headers, &cluster).await;
                principal.map_err(|error| refusal_of(error, class))?
            };
            return Ok(Identified { cluster, principal, target, class });
        }
        let (target, class) = classify(head, surface, identity.operators)?;
        let identified = match act {
            _ if self.dev_insecure => Err(AuthError::NotRetargeted),
            Some(reference) => {
                // Of two we could not be sure which one is meant; neither names anything.
                let repeated = head.headers.get_all(ACT_HEADER).iter().nth(1).is_some();
                let reference = if repeated { "" } else { reference.to_str().unwrap_or_default() };
                Box::pin(identity.authenticate_acting(&head.headers, reference)).await
            }
            None => Box::pin(identity.authenticate_shared(&head.headers)).await,
        };
        let (cluster, principal) = identified.map_err(|error| refusal_of(error, class))?;
        Ok(Identified { cluster, principal, target, class })
    }

    fn identify_static<'r>(
        &self,
        head: &'r RequestHeader,
        surface: Surface,
        cluster: &Arc<Cluster>,
    ) -> Result<Identified<'r>, Refusal> {
        let (target, class) = classify(head, surface, false)?;
        if !self.dev_insecure {
            let missing = head.headers.get(AUTHORIZATION).is_none();
            return Err(Refusal::Auth(if missing { AuthError::Missing } else { AuthError::UnknownKey }));
        }
        Ok(Identified { cluster: Arc::clone(cluster), principal: Principal::Anyone, target, class })
    }

    fn is_shared(&self, host: Option<&str>) -> bool {
        !self.shared_hosts.is_empty()
            && host.is_some_and(|host| self.shared_hosts.contains(&canonical_host(host).to_ascii_lowercase()))
    }

    async fn resolve(&self, control: &ControlPlane, host: Option<&str>) -> Result<Arc<Cluster>, Refusal> {
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

/// The class of a route that is open to tenants, or to operators where there are any.
fn classify(
    head: &RequestHeader,
    surface: Surface,
    operators: bool,
) -> Result<(Target<'_>, RouteClass), Refusal> {
    let target = head::target(head).ok_or(Refusal::RouteBlocked)?;
    if let Surface::Who = surface {
        return Ok((target, RouteClass::Read));
    }
    if !path::is_canonical(target.path) || !route::is_data_plane(target.path) {
        return Err(Refusal::RouteBlocked);
    }
    match route::classify(&head.method, target.path) {
        RouteClass::Blocked => Err(Refusal::RouteBlocked),
        RouteClass::Operator if !operators => Err(Refusal::RouteBlocked),
        class => Ok((target, class)),
    }
}

/// Who is no operator hears of an operator's route what everybody hears of a blocked one.
fn refusal_of(error: AuthError, class: RouteClass) -> Refusal {
    if class == RouteClass::Operator { Refusal::RouteBlocked } else { Refusal::Auth(error) }
}

fn is_gated(cluster: &Cluster, class: RouteClass) -> bool {
    matches!(class, RouteClass::Gated(feature, _) if !cluster.features.contains(feature))
}

fn may(principal: &Principal, class: RouteClass) -> bool {
    match principal {
        Principal::ApiKey(key) => authorize::key_may(key.scopes, class),
        Principal::Person(person) => {
            authorize::role_may(person.role, class) || (class == RouteClass::Operator && person.operator)
        }
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
