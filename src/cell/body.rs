//! Reading a request body under a ceiling of bytes and time.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use tokio::time::timeout;

use super::errors::KvError;

/// Longest wait for a whole body; a client that stalls must not hold a task for ever.
const DEADLINE: Duration = Duration::from_secs(30);

/// Reads all of `body`, at most `limit` bytes. A declared length above the limit is refused unread.
pub(super) async fn read(body: Body, limit: usize) -> Result<Vec<u8>, KvError> {
    if body.size_hint().lower() > u64::try_from(limit).unwrap_or(u64::MAX) {
        return Err(KvError::BodyTooLarge { limit });
    }
    timeout(DEADLINE, collect(body, limit)).await.map_err(|_| KvError::BodyLate)?
}

async fn collect(mut body: Body, limit: usize) -> Result<Vec<u8>, KvError> {
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        // Trailers carry nothing of ours.
        let Ok(data) = frame.map_err(|_| KvError::BodyBroken)?.into_data() else {
            continue;
        };
        if data.len() > limit - bytes.len() {
            return Err(KvError::BodyTooLarge { limit });
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn limit_is_inclusive() {
        for (size, limit, accepted) in [(0, 0, true), (4, 4, true), (5, 4, false), (1, 0, false)] {
            let body = Body::from(vec![b'x'; size]);
            assert_eq!(read(body, limit).await.is_ok(), accepted, "{size} of {limit}");
        }
    }
}
