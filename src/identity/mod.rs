//! Who is asking, and on which cluster: credentials, API keys, sessions, roles, operators (proxy contract
//! §4–§6).

pub mod credential;
pub mod session;

use crate::{
    control::{ControlPlane, Revocation},
    domain::{
        cluster::{Cluster, Person, Principal},
        ids::ClusterId,
        lookup::Lookup,
        slug::Slug,
    },
};
pub use credential::{
    CookieNames, Credential, credential, digest, is_by_https, is_from_elsewhere, session_cookies,
};
use http::HeaderMap;
use session::{Session, SessionKeys};
use std::sync::Arc;
use uuid::Uuid;

/// The header by which a person picks the cluster to act on.
pub const ACT_HEADER: &str = "x-queen-act-cluster";

/// Why a caller is not who it has to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AuthError {
    /// No credential.
    Missing,
    /// No such key, or a revoked one.
    UnknownKey,
    /// The database did not answer and nothing is known of the key, the token or the user.
    Unverifiable,
    /// Not a key, and not a token of ours that is in force.
    Invalid,
    /// A key of another cluster.
    Mismatch,
    /// A token whose user is gone.
    UserGone,
    /// A token that names another cluster.
    OtherCluster,
    /// The user has no role on the cluster.
    NoRole,
    /// Keys are never pointed at another cluster, and neither is a proxy that authenticates nobody.
    NotRetargeted,
    /// The cluster to act on is not there, or not for this user: one answer for both.
    CannotAct,
    /// A shared host, and nothing names the cluster.
    NoneNamed,
}

/// How callers are told apart.
pub struct Identity {
    /// Where keys, users, roles and the deny-list are looked up.
    pub control: ControlPlane,
    /// The keys of sessions; none: every token is invalid.
    pub sessions: Option<SessionKeys>,
    /// Where a session may come as a cookie.
    pub cookies: CookieNames,
    /// Whether operators are live on this cell.
    pub operators: bool,
    /// Whether a session is refused while its revocation cannot be ruled out.
    pub strict: bool,
}

impl Identity {
    /// Who is asking on a host that names `cluster`.
    pub async fn authenticate(&self, headers: &HeaderMap, cluster: &Cluster) -> Result<Principal, AuthError> {
        match credential(headers, &self.cookies) {
            Credential::None => Err(AuthError::Missing),
            Credential::ApiKey(key) => {
                let key = self.key(key).await?;
                if key.cluster == cluster.id { Ok(Principal::ApiKey(key)) } else { Err(AuthError::Mismatch) }
            }
            // Boxed, so that requests with keys do not carry what only sessions need.
            Credential::Session(tokens) => Box::pin(self.authenticate_session(&tokens, cluster)).await,
        }
    }

    async fn authenticate_session(&self, tokens: &[&str], cluster: &Cluster) -> Result<Principal, AuthError> {
        let session = self.session(tokens).await?;
        if session.cluster.is_some_and(|claimed| claimed != cluster.id) {
            return Err(AuthError::OtherCluster);
        }
        self.person(&session, cluster.id).await.map(Principal::Person)
    }

    /// Who is asking, where a header names the cluster to act on. The kind of the credential is judged
    /// before the name is looked up, so that nobody else finds out what exists.
    pub async fn authenticate_acting(
        &self,
        headers: &HeaderMap,
        reference: &str,
    ) -> Result<(Arc<Cluster>, Principal), AuthError> {
        let tokens = match credential(headers, &self.cookies) {
            Credential::None => return Err(AuthError::Missing),
            Credential::ApiKey(key) => {
                // An unknown key hears that it is unknown, as everywhere.
                self.key(key).await?;
                return Err(AuthError::NotRetargeted);
            }
            Credential::Session(tokens) => tokens,
        };
        let session = self.session(&tokens).await?;
        let cluster = match self.referenced(reference).await {
            Lookup::Found(cluster) => cluster,
            Lookup::Absent => {
                self.is_there(&session).await?;
                return Err(AuthError::CannotAct);
            }
            // As for a role that cannot be looked up.
            Lookup::Unavailable => return Err(AuthError::Unverifiable),
        };
        if session.cluster.is_some_and(|claimed| claimed != cluster.id) {
            self.is_there(&session).await?;
            return Err(AuthError::CannotAct);
        }
        match self.person(&session, cluster.id).await {
            Ok(person) => Ok((cluster, Principal::Person(person))),
            Err(AuthError::NoRole) => Err(AuthError::CannotAct),
            Err(other) => Err(other),
        }
    }

    /// Who is asking on a host that several clusters share and where no header names one: a key means its
    /// own cluster, a session the one it claims.
    pub async fn authenticate_shared(
        &self,
        headers: &HeaderMap,
    ) -> Result<(Arc<Cluster>, Principal), AuthError> {
        match credential(headers, &self.cookies) {
            Credential::None => Err(AuthError::Missing),
            Credential::ApiKey(key) => {
                let key = self.key(key).await?;
                match self.control.cluster_by_id(key.cluster).await {
                    Lookup::Found(cluster) => Ok((cluster, Principal::ApiKey(key))),
                    Lookup::Absent => Err(AuthError::UnknownKey),
                    Lookup::Unavailable => Err(AuthError::Unverifiable),
                }
            }
            Credential::Session(tokens) => {
                let session = self.session(&tokens).await?;
                let Some(claimed) = session.cluster else {
                    self.is_there(&session).await?;
                    return Err(AuthError::NoneNamed);
                };
                match self.control.cluster_by_id(claimed).await {
                    Lookup::Found(cluster) => {
                        let person = self.person(&session, cluster.id).await?;
                        Ok((cluster, Principal::Person(person)))
                    }
                    Lookup::Absent => {
                        self.is_there(&session).await?;
                        Err(AuthError::NoRole)
                    }
                    Lookup::Unavailable => Err(AuthError::Unverifiable),
                }
            }
        }
    }

    /// Whether the credential is a live one at all, on a host that names no cluster.
    pub async fn is_live(&self, headers: &HeaderMap) -> Result<(), AuthError> {
        match credential(headers, &self.cookies) {
            Credential::None => Err(AuthError::Missing),
            Credential::ApiKey(key) => self.key(key).await.map(|_| ()),
            Credential::Session(tokens) => {
                let session = self.session(&tokens).await?;
                self.is_there(&session).await
            }
        }
    }

    async fn key(&self, key: &str) -> Result<Arc<crate::domain::cluster::ApiKey>, AuthError> {
        match self.control.key(digest(key)).await {
            Lookup::Found(key) => Ok(key),
            Lookup::Absent => Err(AuthError::UnknownKey),
            Lookup::Unavailable => Err(AuthError::Unverifiable),
        }
    }

    /// A token that is ours and has not ended; it may be revoked.
    pub fn verify(&self, token: &str) -> Option<Session> {
        let verified = self.sessions.as_ref()?.verify(token);
        verified.inspect_err(|reason| tracing::debug!(?reason, "a token is refused")).ok()
    }

    /// The first of these tokens that is ours and in force, if it is not revoked.
    pub async fn session(&self, tokens: &[&str]) -> Result<Session, AuthError> {
        let session = tokens.iter().find_map(|token| self.verify(token)).ok_or(AuthError::Invalid)?;
        // A strict proxy that does not hear of revocations believes no older answer.
        let fresh = self.strict && !self.control.is_listening();
        match self.control.deny_list().look_up(&session.jti, session.expires, fresh).await {
            Revocation::Revoked => Err(AuthError::Invalid),
            Revocation::Unknown if self.strict => Err(AuthError::Unverifiable),
            Revocation::NotRevoked | Revocation::Unknown => Ok(session),
        }
    }

    /// What the session's user is on a cluster: an operator, or what `cluster_roles` says now.
    async fn person(&self, session: &Session, cluster: ClusterId) -> Result<Person, AuthError> {
        if self.operators && self.is_operator(session).await {
            return Ok(Person {
                user: session.user,
                role: crate::domain::scopes::Role::Admin,
                operator: true,
            });
        }
        match self.control.grant(session.user, cluster).await {
            Lookup::Found(grant) => Ok(Person { user: session.user, role: grant.role, operator: false }),
            Lookup::Absent => {
                self.is_there(session).await?;
                Err(AuthError::NoRole)
            }
            Lookup::Unavailable => Err(AuthError::Unverifiable),
        }
    }

    /// Any doubt is no.
    async fn is_operator(&self, session: &Session) -> bool {
        matches!(self.control.user(session.user).await, Lookup::Found(user) if user.is_operator)
    }

    /// Whether the session's user exists; in doubt, yes.
    pub async fn is_there(&self, session: &Session) -> Result<(), AuthError> {
        match self.control.user(session.user).await {
            Lookup::Absent => Err(AuthError::UserGone),
            Lookup::Found(_) | Lookup::Unavailable => Ok(()),
        }
    }

    /// A cluster by its UUID, else by its slug.
    async fn referenced(&self, reference: &str) -> Lookup<Cluster> {
        let reference = reference.trim();
        if let Ok(id) = Uuid::parse_str(reference) {
            return self.control.cluster_by_id(ClusterId(id)).await;
        }
        match Slug::parse(reference) {
            Some(slug) => self.control.cluster(slug).await,
            None => Lookup::Absent,
        }
    }
}
