//! The order of the checks (D3). Read [`Pipeline::admit`] from top to bottom: a stranger learns
//! nothing but whether a host exists and whether a route does.

use super::{
    body::{Inspection, Subject},
    caps::Caps,
    client::canonical_name,
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
        status::{PushBlock, Restriction},
    },
    identity::{ACT_HEADER, AuthError, Identity},
    limits::ClusterLimits,
    metering::sample::MeteredRoute,
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
    /// The plans' caps.
    pub caps: Caps,
}

/// A request that passed, and what its body still has to pass.
pub struct Admitted {
    pub(super) class: RouteClass,
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
    pub async fn admit(&self, head: &RequestHeader, timeouts: &Timeouts) -> Result<Admitted, Refusal> {
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
        let counters = self.caps.counters(cluster.id);
        let block = self.push_block(&cluster, &counters);
        if let Some(block) = block
            && grows(class)
        {
            return Err(Refusal::PushBlocked(block));
        }
        let may_consume = may(&principal, RouteClass::Consume);
        let subject = subject(class, target.path, feature_gated, may_consume, block);
        let inspection = self.inspection(head, class, subject)?;
        let budget = budget(target, timeouts);
        let parks = route::long_poll_wait_ms(target.path, target.query).is_some();
        let metered = MeteredRoute::of(class, target.path);
        let forward = Forward { cluster, principal, budget, counters, parks, metered };
        Ok(Admitted { class, forward, inspection })
    }

    /// Whether a request for `host` may come where TLS was told `name`: they do not name different clusters.
    pub async fn is_meant(&self, name: &str, host: Option<&str>) -> bool {
        let host = host.map(canonical_name);
        if host.as_deref() == Some(name) {
            return true;
        }
        let Directory::Control(identity) = &self.directory else { return true };
        let (mut named, mut asked) = (None, None);
        for (host, cluster) in [(Some(name), &mut named), (host.as_deref(), &mut asked)] {
            if !self.is_shared(host) {
                *cluster = self.resolve(&identity.control, host).await.ok().map(|cluster| cluster.id);
            }
        }
        named == asked
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

    /// Why nothing may be added, if so.
    fn push_block(&self, cluster: &Cluster, counters: &ClusterLimits) -> Option<PushBlock> {
        if counters.is_storage_blocked(cluster.limits.max_retained_bytes) {
            Some(PushBlock::Storage)
        } else if self.caps.blocks.is_blocked(cluster.id) {
            Some(PushBlock::Monthly)
        } else {
            (cluster.restriction == Restriction::PushBlocked).then_some(PushBlock::Lifecycle)
        }
    }

    /// How a body is read that still has to pass.
    fn inspection(
        &self,
        head: &RequestHeader,
        class: RouteClass,
        subject: Option<Subject>,
    ) -> Result<Option<Inspection>, Refusal> {
        // Batches are refused whether or not they are read now: what a client may send must not depend on
        // its status.
        if subject.is_some() || matches!(class, RouteClass::Gated(_, Effect::Mixed)) {
            let mut codings = head.headers.get_all(CONTENT_ENCODING).iter();
            if codings.any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
                return Err(Refusal::EncodedBody);
            }
        }
        let Some(subject) = subject else { return Ok(None) };
        let length = head.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
        // More digits than fit are more bytes than fit.
        let length = length.map(|text| text.parse().unwrap_or(usize::MAX));
        if length.is_some_and(|length| length > self.max_body_bytes) {
            return Err(Refusal::BodyTooLarge);
        }
        Ok(Some(Inspection { subject, length }))
    }
}

/// What is read of the body, if anything: everywhere else it streams.
fn subject(
    class: RouteClass,
    path: &str,
    feature_gated: bool,
    may_consume: bool,
    block: Option<PushBlock>,
) -> Option<Subject> {
    match class {
        RouteClass::Produce if path == "/api/v1/push" => Some(Subject::Push),
        RouteClass::Produce => Some(Subject::Transaction),
        RouteClass::QueueAdmin { .. } if path == "/api/v1/configure" => Some(Subject::Configure),
        // The other kind of replay names no destination.
        RouteClass::QueueAdmin { replays: true } if path.starts_with("/api/v1/dlq/") => Some(Subject::Replay),
        RouteClass::Gated(Feature::Ephemeral, Effect::Grow) => Some(Subject::EphemeralPush),
        RouteClass::Gated(Feature::Streams, Effect::Mixed) => Some(Subject::Cycle { block }),
        RouteClass::Gated(feature, Effect::Mixed) if feature_gated || block.is_some() => {
            let facade_may_pass = feature == Feature::Kv && may_consume;
            Some(Subject::Batch { feature_gated, facade_may_pass, block })
        }
        _ => None,
    }
}

/// A word for the kind of route that a refused request asked for.
pub(super) fn class_of(head: &RequestHeader) -> &'static str {
    let target = head::target(head).filter(|t| path::is_canonical(t.path) && route::is_data_plane(t.path));
    target.map_or(RouteClass::Blocked, |target| route::classify(&head.method, target.path)).word()
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
