//! `/auth/*`: signing in and out, and who one is (proxy contract §6). On every host, without a cluster.

mod cookies;
mod guesses;
mod pages;
mod passwords;
mod slow_hash;
mod throttle;
mod who;

use super::Reply;
use crate::{
    control::{NotRevoked, now_s},
    domain::ids::{ClusterId, UserId},
    identity::{
        AuthError, Identity, is_from_elsewhere,
        session::{Session, SessionKeys},
        session_cookies,
    },
};
use bytes::Bytes;
pub use cookies::SessionCookies;
use guesses::{Guesses, account};
use http::{HeaderMap, HeaderName, HeaderValue, header};
pub use pages::PortalLink;
use pages::{Pages, safe_next};
use passwords::{Busy, Passwords};
use serde_json::json;
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

/// Tokens per user and minute from `/auth/session-token`; and sessions that are ended.
const SESSIONS_PER_USER: u32 = 60;

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
    /// Failures per account and client address, and minute.
    pub failures_per_account_and_address: u32,
    /// Failures per account and minute, from wherever.
    pub failures_per_account: u32,
    /// Addresses, accounts, and so on, that are counted at a time.
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
    /// From somebody else's page.
    FromElsewhere,
    /// A session is to replace the one of another user.
    OtherUser,
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
    guesses: Guesses,
    minted: Throttle<UserId>,
    ended: Throttle<UserId>,
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
            guesses: Guesses::new(&settings),
            minted: Throttle::new(SESSIONS_PER_USER, settings.max_tracked),
            ended: Throttle::new(SESSIONS_PER_USER, settings.max_tracked),
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
        self.signer()?;
        let (now, origin) = (Instant::now(), origin(visit.client));
        self.guesses.by_address(origin, now)?;
        let form = Form::read(visit.headers, body).ok_or(AuthRefusal::NoForm)?;
        // Counted before the check, so that many at once are not one; and whether or not there is such an
        // account, so that being throttled tells nothing.
        let account = account(&form.email);
        self.guesses.of_account(account, origin, now)?;
        let user = self.check(&form, origin).await.inspect_err(|_| {
            self.guesses.nothing_wrong(account, origin);
            self.guesses.nothing_tried(origin);
        })?;
        let next = safe_next(form.next.as_deref());
        let Some(user) = user else {
            return Ok(self.page(401, next, true));
        };
        self.guesses.nothing_wrong(account, origin);
        if let Err(error) = self.identity.control.record_login(user).await {
            tracing::warn!(%error, "a sign-in is not in the audit");
        }
        let token = self.mint(user, None, self.settings.ttl_s)?;
        let cookie = self.settings.cookies.session(&token, self.settings.ttl_s, visit.https);
        let mut reply = see_other(next, cookie)?;
        // A session of before that was handed over to this cell would come first.
        let of_cell = self.settings.cookies.clearing_cell(visit.https);
        reply.headers.extend(of_cell.map(|cookie| (header::SET_COOKIE, cookie)));
        Ok(reply)
    }

    /// Whose email and password these are.
    async fn check(&self, form: &Form<'_>, origin: IpAddr) -> Result<Option<UserId>, AuthRefusal> {
        let can_exist = form.email.len() <= MAX_EMAIL && !form.email.contains('\0');
        let email = if can_exist { form.email.clone() } else { String::new() };
        let turn = self.passwords.turn(origin).await?;
        let known = self.identity.control.login(email).await.map_err(|error| {
            tracing::warn!(%error, "nobody can sign in");
            AuthRefusal::Unavailable
        })?;
        let (user, hash) = known.map(|login| (login.user, login.password_hash)).unzip();
        let right = turn.verify(form.password.clone().into_owned(), hash.flatten()).await?;
        Ok(user.filter(|_| right))
    }

    /// `POST /auth/logout`: revokes every session that was presented. The cookies stay unless all of them are
    /// written down as revoked, or will be.
    pub async fn log_out(&self, visit: &Visit<'_>) -> Result<Reply, AuthRefusal> {
        if is_from_elsewhere(visit.headers) {
            return Err(AuthRefusal::FromElsewhere);
        }
        let mut outcome = Ok(());
        for session in self.presented(visit) {
            outcome = self.end(session).await.and(outcome);
        }
        outcome?;
        let mut reply = Reply::json(&json!({ "ok": true }));
        for cookie in self.settings.cookies.clearing(visit.https) {
            reply.headers.push((header::SET_COOKIE, cookie));
        }
        Ok(reply)
    }

    async fn end(&self, session: Session) -> Result<(), AuthRefusal> {
        self.ended.take(session.user, Instant::now())?;
        let revoked = self.identity.control.revoke(session.jti.clone(), session.expires, session.user).await;
        match revoked {
            // Of a user that is gone no session can be revoked, and none is in force.
            Err(NotRevoked) if self.identity.is_there(&session).await.is_ok() => {
                Err(AuthRefusal::Unavailable)
            }
            _ => Ok(()),
        }
    }

    /// The sessions in the cookies that are ours; they may be revoked.
    fn presented(&self, visit: &Visit<'_>) -> Vec<Session> {
        let tokens = session_cookies(visit.headers, &self.identity.cookies);
        tokens.into_iter().filter_map(|token| self.identity.verify(token)).collect()
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
        // No longer than the session itself, or tokens that beget tokens would never end.
        let ttl_s = session.expires.saturating_sub(now_s()).min(SESSION_TOKEN_S);
        if ttl_s == 0 {
            return Err(AuthRefusal::InvalidSession);
        }
        self.minted.take(session.user, Instant::now())?;
        let token = self.mint(session.user, session.cluster, ttl_s)?;
        Ok(Reply::json(&json!({ "token": token, "expires_in": ttl_s })))
    }

    async fn adopt(&self, visit: &Visit<'_>, token: &str) -> Result<Reply, AuthRefusal> {
        if !is_place_to_go(visit.headers) {
            return Err(AuthRefusal::FromElsewhere);
        }
        let session = self.identity.session(&[token]).await.map_err(AuthRefusal::Auth)?;
        self.identity.is_there(&session).await.map_err(AuthRefusal::Auth)?;
        // A link must not put somebody else in the place of who is signed in.
        let tokens = session_cookies(visit.headers, &self.identity.cookies);
        for token in tokens {
            let there = self.identity.session(&[token]).await;
            if there.is_ok_and(|there| there.user != session.user) {
                return Err(AuthRefusal::OtherUser);
            }
        }
        let rest = session.expires.saturating_sub(now_s());
        let next = parameter(visit.query, "next");
        see_other(safe_next(next.as_deref()), self.settings.cookies.of_cell(token, rest, visit.https))
    }

    /// The session in the cookie.
    async fn session(&self, visit: &Visit<'_>) -> Result<Session, AuthRefusal> {
        let tokens = who::cookies(visit.headers, &self.identity).ok_or(AuthRefusal::NoSession)?;
        self.identity.session(&tokens).await.map_err(|error| match error {
            AuthError::Invalid => AuthRefusal::InvalidSession,
            other => AuthRefusal::Auth(other),
        })
    }

    fn signer(&self) -> Result<&SessionKeys, AuthRefusal> {
        self.identity.sessions.as_ref().filter(|keys| keys.can_mint()).ok_or(AuthRefusal::NotConfigured)
    }

    fn mint(&self, user: UserId, cluster: Option<ClusterId>, ttl_s: u64) -> Result<String, AuthRefusal> {
        let minted = self.signer()?.mint(user, cluster, now_s(), ttl_s);
        minted.map(|(token, _)| token).ok_or(AuthRefusal::Internal)
    }

    fn page(&self, status: u16, next: &str, failed: bool) -> Reply {
        // Browsers say `Origin: null` for a form on a page that keeps its address from everybody.
        let mut headers = unseen_but_by("same-origin");
        headers.push((header::CONTENT_SECURITY_POLICY, self.pages.policy()));
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
    unseen_but_by("no-referrer")
}

/// The same, but for whom `referrer_policy` lets know of the address.
fn unseen_but_by(referrer_policy: &'static str) -> Vec<(HeaderName, HeaderValue)> {
    vec![
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::REFERRER_POLICY, HeaderValue::from_static(referrer_policy)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ]
}

/// Whether somebody goes to a page, as far as a browser says: not an image, a frame or a script's request.
fn is_place_to_go(headers: &HeaderMap) -> bool {
    let said = |name: &str| headers.get(name).map(HeaderValue::as_bytes);
    match (said("sec-fetch-site"), said("sec-fetch-mode"), said("sec-fetch-dest")) {
        (None, None, None) => true,
        (_, mode, dest) => mode == Some(b"navigate") && dest == Some(b"document"),
    }
}

fn parameter<'q>(query: Option<&'q str>, name: &str) -> Option<Cow<'q, str>> {
    form_urlencoded::parse(query?.as_bytes()).find(|(field, _)| field == name).map(|(_, value)| value)
}
