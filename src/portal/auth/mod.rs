//! `/auth/*`: signing in and out, and who one is (proxy contract §6). On every host, without a cluster.

mod cookies;
mod pages;
mod passwords;
mod throttle;
mod who;

use super::Reply;
use crate::{
    control::now_s,
    domain::ids::{ClusterId, UserId},
    identity::{
        AuthError, Identity, is_from_elsewhere,
        session::{Session, SessionKeys},
        session_cookies,
    },
};
use bytes::Bytes;
pub use cookies::SessionCookies;
use http::{HeaderMap, HeaderName, HeaderValue, header};
pub use pages::PortalLink;
use pages::{Pages, safe_next};
use passwords::{Busy, Passwords};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::{borrow::Cow, net::IpAddr, sync::Arc, time::Instant};
use throttle::{Throttle, TooMany, origin};
use url::form_urlencoded;
pub use who::Acting;

/// Largest sign-in form, in bytes.
pub const MAX_FORM: usize = 16 * 1024;
/// Longest email that is looked up, in bytes: none that can receive mail is longer.
const MAX_EMAIL: usize = 320;
/// Life of a token from `/auth/session-token`, in seconds.
const SESSION_TOKEN_S: u64 = 900;

/// What an operator may set of all this.
#[derive(Clone, Debug)]
pub struct AuthSettings {
    /// Life of a session, in seconds.
    pub ttl_s: u64,
    /// Its cookies.
    pub cookies: SessionCookies,
    /// Where people sign in when this host only verifies.
    pub portal: Option<PortalLink>,
    /// Threads that check passwords.
    pub workers: usize,
    /// Checks that may wait for them.
    pub queue: usize,
    /// Attempts per client address and minute.
    pub attempts_per_address: u32,
    /// Failures per account and minute.
    pub failures_per_account: u32,
    /// Addresses, and accounts, that are counted at a time.
    pub max_tracked: usize,
}

/// Why there is no success. The answers tell nothing of who has an account.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AuthRefusal {
    /// No session cookie.
    NoSession,
    /// One that is not in force.
    InvalidSession,
    /// The session, or its user, as on any route.
    Auth(AuthError),
    /// A form on somebody else's page.
    FromElsewhere,
    /// The body is no form.
    NoForm,
    /// Too many attempts; seconds until the next.
    TooMany(u32),
    /// Too many sign-ins at the moment.
    Busy,
    /// The database does not answer.
    Unavailable,
    /// Nothing to sign tokens with, or no control plane.
    NotConfigured,
    /// A token could not be made.
    Internal,
}

/// A request for one of these routes.
pub struct Visit<'r> {
    /// Headers.
    pub headers: &'r HeaderMap,
    /// Query string, without the `?`.
    pub query: Option<&'r str>,
    /// The client's address, as far as it can be trusted.
    pub client: Option<IpAddr>,
    /// Whether the client came by https.
    pub https: bool,
}

/// Signing in and out.
pub struct Auth {
    identity: Arc<Identity>,
    settings: AuthSettings,
    pages: Pages,
    passwords: Passwords,
    addresses: Throttle<IpAddr>,
    accounts: Throttle<[u8; 32]>,
}

/// The sign-in form as sent.
struct Form<'b> {
    email: String,
    password: Cow<'b, str>,
    next: Option<Cow<'b, str>>,
}

impl Auth {
    /// Starts the threads that check passwords.
    pub fn new(identity: Arc<Identity>, settings: AuthSettings) -> std::io::Result<Self> {
        let can_sign_in = identity.sessions.as_ref().is_some_and(SessionKeys::can_mint);
        Ok(Self {
            pages: Pages::new(can_sign_in, settings.portal.clone()),
            passwords: Passwords::start(settings.workers, settings.queue)?,
            addresses: Throttle::new(settings.attempts_per_address, settings.max_tracked),
            accounts: Throttle::new(settings.failures_per_account, settings.max_tracked),
            identity,
            settings,
        })
    }

    /// `GET /auth/login`.
    pub fn login_page(&self, visit: &Visit<'_>) -> Reply {
        let next = parameter(visit.query, "next");
        self.page(200, safe_next(next.as_deref()), false)
    }

    /// `POST /auth/login`.
    pub async fn log_in(&self, visit: &Visit<'_>, body: &[u8]) -> Result<Reply, AuthRefusal> {
        // Whoever signs a visitor in to an account of their own reads what the visitor does there.
        if is_from_elsewhere(visit.headers) {
            return Err(AuthRefusal::FromElsewhere);
        }
        if !self.identity.sessions.as_ref().is_some_and(SessionKeys::can_mint) {
            return Err(AuthRefusal::NotConfigured);
        }
        let now = Instant::now();
        self.addresses.take(origin(visit.client), now)?;
        let form = Form::read(visit.headers, body).ok_or(AuthRefusal::NoForm)?;
        // Counted before the check, so that many at once are not one; and whether or not there is such an
        // account, so that being throttled tells nothing.
        let account: [u8; 32] = Sha256::digest(&form.email).into();
        self.accounts.take(account, now)?;
        let user = self.check(&form).await.inspect_err(|_| self.accounts.give_back(account))?;
        let next = safe_next(form.next.as_deref());
        let Some(user) = user else {
            return Ok(self.page(401, next, true));
        };
        self.accounts.give_back(account);
        if let Err(error) = self.identity.control.record_login(user).await {
            tracing::warn!(%error, "a sign-in is not in the audit");
        }
        let (token, _) = self.mint(user, None, self.settings.ttl_s)?;
        let cookie = self.settings.cookies.session(&token, self.settings.ttl_s, visit.https);
        see_other(next, cookie)
    }

    /// Whose email and password these are.
    async fn check(&self, form: &Form<'_>) -> Result<Option<UserId>, AuthRefusal> {
        let can_exist = form.email.len() <= MAX_EMAIL && !form.email.contains('\0');
        let email = if can_exist { form.email.clone() } else { String::new() };
        let known = self.identity.control.login(email).await.map_err(|error| {
            tracing::warn!(%error, "nobody can sign in");
            AuthRefusal::Unavailable
        })?;
        let (user, hash) = known.map(|login| (login.user, login.password_hash)).unzip();
        let right = self.passwords.verify(form.password.clone().into_owned(), hash.flatten()).await?;
        Ok(user.filter(|_| right))
    }

    /// `POST /auth/logout`: revokes every session that was presented.
    pub async fn log_out(&self, visit: &Visit<'_>) -> Reply {
        let tokens = session_cookies(visit.headers, &self.identity.cookies).flatten();
        for session in tokens.filter_map(|token| self.identity.verify(token)) {
            self.identity.control.revoke(session.jti, session.expires, session.user).await;
        }
        let mut reply = Reply::json(&json!({ "ok": true }));
        for cookie in self.settings.cookies.clearing(visit.https) {
            reply.headers.push((header::SET_COOKIE, cookie));
        }
        reply
    }

    /// `GET /auth/session-token`: a short token for a script of the page, or a session handed over to a host
    /// that only verifies.
    pub async fn session_token(&self, visit: &Visit<'_>) -> Result<Reply, AuthRefusal> {
        let keys = self.identity.sessions.as_ref().ok_or(AuthRefusal::NotConfigured)?;
        if !keys.can_mint()
            && let Some(token) = parameter(visit.query, "token")
        {
            return self.adopt(visit, &token).await;
        }
        let session = self.session(visit).await?;
        self.identity.is_there(&session).await.map_err(AuthRefusal::Auth)?;
        let (token, _) = self.mint(session.user, session.cluster, SESSION_TOKEN_S)?;
        Ok(Reply::json(&json!({ "token": token, "expires_in": SESSION_TOKEN_S })))
    }

    async fn adopt(&self, visit: &Visit<'_>, token: &str) -> Result<Reply, AuthRefusal> {
        let session = self.identity.session(token).await.map_err(AuthRefusal::Auth)?;
        self.identity.is_there(&session).await.map_err(AuthRefusal::Auth)?;
        let rest = session.expires.saturating_sub(now_s());
        let next = parameter(visit.query, "next");
        see_other(safe_next(next.as_deref()), self.settings.cookies.of_cell(token, rest, visit.https))
    }

    /// The session in the cookie.
    async fn session(&self, visit: &Visit<'_>) -> Result<Session, AuthRefusal> {
        let token = who::cookie(visit.headers, &self.identity).ok_or(AuthRefusal::NoSession)?;
        self.identity.session(token).await.map_err(|error| match error {
            AuthError::Invalid => AuthRefusal::InvalidSession,
            other => AuthRefusal::Auth(other),
        })
    }

    fn mint(
        &self,
        user: UserId,
        cluster: Option<ClusterId>,
        ttl_s: u64,
    ) -> Result<(String, Session), AuthRefusal> {
        let keys = self.identity.sessions.as_ref().filter(|keys| keys.can_mint());
        keys.ok_or(AuthRefusal::NotConfigured)?
            .mint(user, cluster, now_s(), ttl_s)
            .ok_or(AuthRefusal::Internal)
    }

    fn page(&self, status: u16, next: &str, failed: bool) -> Reply {
        let mut headers = unseen();
        headers.push((header::CONTENT_SECURITY_POLICY, self.pages.policy()));
        headers.push((header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")));
        Reply {
            status,
            content_type: "text/html; charset=utf-8",
            headers,
            body: self.pages.login(next, failed),
        }
    }
}

impl Form<'_> {
    fn read<'b>(headers: &HeaderMap, body: &'b [u8]) -> Option<Form<'b>> {
        let kind = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
            return None;
        }
        let field = |name: &str| form_urlencoded::parse(body).find(|(field, _)| field == name).map(|f| f.1);
        Some(Form {
            // Addresses are kept in lower case; nothing is trimmed.
            email: field("email").unwrap_or_default().to_lowercase(),
            password: field("password").unwrap_or_default(),
            next: field("next"),
        })
    }
}

impl From<TooMany> for AuthRefusal {
    fn from(TooMany(seconds): TooMany) -> Self {
        Self::TooMany(seconds)
    }
}

impl From<Busy> for AuthRefusal {
    fn from(Busy: Busy) -> Self {
        Self::Busy
    }
}

/// On the way to `next` with a cookie.
fn see_other(next: &str, cookie: Option<HeaderValue>) -> Result<Reply, AuthRefusal> {
    let cookie = cookie.ok_or(AuthRefusal::Internal)?;
    let location = HeaderValue::from_str(next).map_err(|_| AuthRefusal::Internal)?;
    let mut headers = unseen();
    headers.push((header::LOCATION, location));
    headers.push((header::SET_COOKIE, cookie));
    Ok(Reply { status: 303, content_type: "text/plain", headers, body: Bytes::new() })
}

/// What says that an answer is nobody else's business.
pub(super) fn unseen() -> Vec<(HeaderName, HeaderValue)> {
    vec![
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ]
}

fn parameter<'q>(query: Option<&'q str>, name: &str) -> Option<Cow<'q, str>> {
    form_urlencoded::parse(query?.as_bytes()).find(|(field, _)| field == name).map(|(_, value)| value)
}
