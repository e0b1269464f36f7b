//! Routes the proxy serves itself: what of a request the portal needs, and its body.

use super::{Gateway, answer, forward::ClientSide, head, refusal::Refusal};
use crate::{
    domain::ids::RequestId,
    identity::is_by_https,
    portal::{
        Reply, Route,
        auth::{Auth, AuthRefusal, MAX_FORM, Visit},
    },
};
use http::Method;
use pingora::{Result, prelude::Session};
use std::time::Duration;
use tokio::time::timeout;

/// How long a form may take to arrive.
const FORM_TIME: Duration = Duration::from_secs(10);

impl Gateway {
    /// Answers a route of our own; returns the refusal's code, or "ok".
    pub(super) async fn serve_own(
        &self,
        session: &mut Session,
        id: RequestId,
        route: Route,
    ) -> Result<&'static str> {
        if !route.takes(&session.req_header().method) {
            answer::refuse_method(session, id, route.methods()).await?;
            return Ok(Refusal::MethodNotAllowed.wire().code);
        }
        let reply = match (route, &self.portal.auth) {
            (Route::Health, _) => Ok(self.portal.health()),
            (Route::Jwks, _) => Ok(self.portal.jwks()),
            (Route::Provider, _) => Err(Refusal::NotConfigured),
            (_, Some(auth)) => self.serve_auth(session, id, route, auth).await,
            (_, None) => Err(Refusal::Portal(AuthRefusal::NotConfigured)),
        };
        match reply {
            Ok(reply) => {
                answer::write(session, id, reply).await?;
                Ok("ok")
            }
            Err(refusal) => {
                answer::refuse(session, id, refusal).await?;
                Ok(refusal.wire().code)
            }
        }
    }

    async fn serve_auth(
        &self,
        session: &mut Session,
        id: RequestId,
        route: Route,
        auth: &Auth,
    ) -> Result<Reply, Refusal> {
        let posted = route == Route::Login && session.req_header().method == Method::POST;
        let form = if posted { read_form(session).await? } else { Vec::new() };
        let peer = session.client_addr().and_then(|address| address.as_inet()).copied();
        let head = session.req_header();
        let settings = self.live.settings();
        let https = is_by_https(&head.headers);
        let client =
            ClientSide { id, peer, https, host: head::host(head), trusted: &settings.trusted_proxies };
        let visit = Visit {
            headers: &head.headers,
            query: head.uri.query(),
            client: client.address(&head.headers),
            https,
        };
        let reply = match route {
            Route::Login if posted => auth.log_in(&visit, &form).await,
            Route::Login => Ok(auth.login_page(&visit)),
            Route::Logout => auth.log_out(&visit).await,
            Route::SessionToken => auth.session_token(&visit).await,
            _ => {
                let acting = match self.pipeline.who(head).await {
                    Err(refusal) if auth.is_key(&head.headers) => return Err(refusal),
                    acting => acting.ok(),
                };
                auth.me(&visit, acting).await
            }
        };
        reply.map_err(Refusal::Portal)
    }
}

/// The body of a form, which is small.
async fn read_form(session: &mut Session) -> Result<Vec<u8>, Refusal> {
    let reading = async {
        if session.req_header().headers.contains_key("expect") {
            session
                .as_downstream_mut()
                .write_continue_response()
                .await
                .map_err(|_| Refusal::ClientStalled)?;
        }
        let mut form = Vec::new();
        loop {
            match session.as_downstream_mut().read_request_body().await {
                Ok(None) => return Ok(form),
                Ok(Some(piece)) if form.len() + piece.len() <= MAX_FORM => form.extend_from_slice(&piece),
                Ok(Some(_)) => return Err(Refusal::BodyTooLarge),
                Err(_) => return Err(Refusal::ClientStalled),
            }
        }
    };
    timeout(FORM_TIME, reading).await.unwrap_or(Err(Refusal::ClientStalled))
}
