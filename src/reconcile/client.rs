//! Asking a cell for its listing, over plain HTTP/1.1, with a bound on time and on size.

use crate::{
    control::queues::{Target, Way},
    domain::ids::RequestId,
};
use bytes::Bytes;
use http::{Request, StatusCode, Uri, header::AUTHORIZATION};
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a whole listing (proxy contract §14).
const LIMIT: Duration = Duration::from_secs(10);
/// Largest listing, in bytes (proxy contract §14).
const MAX_BYTES: usize = 16 << 20;
/// To open a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Cells close idle connections after 8 s and more.
const IDLE: Duration = Duration::from_secs(4);

/// Why a cell gave no listing. The text names no credential.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum PollError {
    #[error("its base_url is no plain http:// URL, or its secret is not fit for a header")]
    NoWay,
    #[error("it cannot be reached")]
    Unreachable,
    #[error("it broke off")]
    BrokeOff,
    #[error("it did not answer in time")]
    Late,
    #[error("it answered {0}")]
    Status(StatusCode),
    #[error("its answer is too large")]
    TooLarge,
    #[error("its answer is no listing")]
    NoListing,
}

impl PollError {
    /// Whether it says something of the whole cell, rather than of one cluster there.
    pub fn is_of_cell(self) -> bool {
        matches!(self, Self::NoWay | Self::Unreachable | Self::BrokeOff | Self::Late)
    }
}

/// Keeps connections to the cells.
pub(super) struct CellClient {
    http: Client<HttpConnector, Empty<Bytes>>,
    tenant_header: bool,
}

impl CellClient {
    /// At most `idle` connections to each cell are kept. With `tenant_header` cells are told the tenant.
    pub fn new(idle: usize, tenant_header: bool) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(idle)
            .build(connector);
        Self { http, tenant_header }
    }

    /// The body of a listing.
    pub async fn listing(&self, target: &Target) -> Result<Vec<u8>, PollError> {
        let request =
            target.cell.way.as_ref().and_then(|way| self.request(target, way)).ok_or(PollError::NoWay)?;
        timeout(LIMIT, self.ask(request)).await.unwrap_or(Err(PollError::Late))
    }

    async fn ask(&self, request: Request<Empty<Bytes>>) -> Result<Vec<u8>, PollError> {
        let answer =
            self.http.request(request).await.map_err(|error| {
                if error.is_connect() { PollError::Unreachable } else { PollError::BrokeOff }
            })?;
        if answer.status() != StatusCode::OK {
            return Err(PollError::Status(answer.status()));
        }
        let mut body = answer.into_body();
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|_| PollError::BrokeOff)?.into_data() else { continue };
            if bytes.len() + piece.len() > MAX_BYTES {
                return Err(PollError::TooLarge);
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    fn request(&self, target: &Target, way: &Way) -> Option<Request<Empty<Bytes>>> {
        let uri = Uri::builder()
            .scheme("http")
            .authority(way.authority.clone())
            .path_and_query(format!("{}/api/v1/resources/queues?stats=cached", way.prefix))
            .build()
            .ok()?;
        let mut request = Request::get(uri).header("x-queen-request-id", RequestId::new().to_string());
        if self.tenant_header {
            request = request.header("x-queen-tenant", target.broker_tenant.to_string());
        }
        if let Some(bearer) = &way.bearer {
            request = request.header(AUTHORIZATION, bearer.clone());
        }
        request.body(Empty::new()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::{CellClient, Way};
    use crate::{
        control::queues::{Target, TargetCell},
        domain::{
            ids::{BrokerTenant, ClusterId},
            limits::Cap,
        },
    };
    use std::sync::Arc;
    use uuid::Uuid;

    #[tokio::test]
    async fn cells_are_told_the_tenant_as_requests_tell_them() {
        let way = Way { authority: "[::1]:7".parse().unwrap(), prefix: "/p".into(), bearer: None };
        let target = Target {
            id: ClusterId(Uuid::nil()),
            slug: "acme".into(),
            broker_tenant: BrokerTenant(Uuid::nil()),
            partitions: Cap::Unlimited,
            retained: Cap::Unlimited,
            cell: Arc::new(TargetCell { id: Uuid::nil(), slug: "cell".into(), way: Some(way.clone()) }),
        };
        for tenant_header in [true, false] {
            let request = CellClient::new(1, tenant_header).request(&target, &way).unwrap();
            assert_eq!(request.uri(), "http://[::1]:7/p/api/v1/resources/queues?stats=cached");
            assert_eq!(request.headers().contains_key("x-queen-tenant"), tenant_header);
            assert!(!request.headers().contains_key("authorization"));
        }
    }
}
