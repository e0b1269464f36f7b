//! Bodies that must be inspected: complete before a byte of them goes upstream, and then exactly
//! the bytes that came (D22).
//!
//! The body is collected in Pingora's own body filter, which is the one way that works for every
//! framing and size: reading it earlier hangs beyond 64 KiB for chunked and HTTP/2 bodies.

use super::refusal::Refusal;
use crate::policy::batch::{Batch, cycle_pushes};
use bytes::{Bytes, BytesMut};

/// What a body has to pass on a cluster that is push-blocked or whose plan lacks the feature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inspection {
    pub subject: Subject,
    /// Largest body, in bytes.
    pub ceiling: usize,
}

/// What kind of body it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Subject {
    /// Operations on KV or timers.
    Batch {
        /// The plan lacks the feature: only facade bookkeeping may pass.
        feature_gated: bool,
        /// The caller may consume, so that facade bookkeeping counts as that.
        facade_may_pass: bool,
    },
    /// One cycle of a stream, on a push-blocked cluster.
    Cycle,
}

impl Inspection {
    /// Judges a whole body. What cannot be read is refused: the cell might read it in another way.
    fn judge(self, body: &[u8]) -> Result<(), Refusal> {
        let growing = match self.subject {
            Subject::Cycle => cycle_pushes(body).ok_or(Refusal::UnreadableBody)?,
            Subject::Batch { feature_gated, facade_may_pass } => {
                let batch = Batch::read(body).ok_or(Refusal::UnreadableBody)?;
                if batch.facade_bookkeeping && facade_may_pass {
                    return Ok(());
                }
                if feature_gated {
                    return Err(Refusal::FeatureGated);
                }
                batch.growing
            }
        };
        if growing { Err(Refusal::PushBlocked) } else { Ok(()) }
    }
}

/// A body on its way in.
pub(super) struct Collector {
    inspection: Inspection,
    collected: BytesMut,
}

impl Collector {
    pub fn new(inspection: Inspection) -> Self {
        Self { inspection, collected: BytesMut::new() }
    }

    /// Takes the next piece and leaves in its place what may go upstream now: nothing until the
    /// end, then everything.
    pub fn take(&mut self, piece: &mut Option<Bytes>, end: bool) -> Result<(), Refusal> {
        if let Some(bytes) = piece.take() {
            if self.collected.len() + bytes.len() > self.inspection.ceiling {
                return Err(Refusal::BodyTooLarge);
            }
            self.collected.extend_from_slice(&bytes);
        }
        if end {
            self.inspection.judge(&self.collected)?;
            *piece = Some(self.collected.split().freeze());
        } else {
            // Not `None`: that would end the upstream body.
            *piece = Some(Bytes::new());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Collector, Inspection, Subject};
    use crate::gateway::refusal::Refusal;
    use bytes::Bytes;

    fn run(inspection: Inspection, pieces: &[&[u8]]) -> Result<Vec<u8>, Refusal> {
        let mut collector = Collector::new(inspection);
        let mut out = Vec::new();
        for (at, bytes) in pieces.iter().enumerate() {
            let mut piece = Some(Bytes::copy_from_slice(bytes));
            let end = at + 1 == pieces.len();
            collector.take(&mut piece, end)?;
            let passed = piece.unwrap();
            assert!(end || passed.is_empty(), "nothing goes before the end");
            out.extend_from_slice(&passed);
        }
        Ok(out)
    }

    const fn batch(feature_gated: bool, facade_may_pass: bool) -> Inspection {
        Inspection { subject: Subject::Batch { feature_gated, facade_may_pass }, ceiling: 100 }
    }

    const BLOCKED: Inspection = batch(false, true);
    const GATED: Inspection = batch(true, true);
    const CYCLE: Inspection = Inspection { subject: Subject::Cycle, ceiling: 100 };

    #[test]
    fn what_passes_goes_out_as_it_came() {
        let read = br#"[{"op":"get","ns":"a","key":"b"}]"#;
        for split in 0..=read.len() {
            let (first, rest) = read.split_at(split);
            assert_eq!(run(BLOCKED, &[first, rest]).unwrap(), read);
        }
    }

    #[test]
    fn refusals() {
        let put: &[u8] = br#"[{"op":"put","ns":"a","key":"b"}]"#;
        let facade: &[u8] = br#"[{"op":"put","ns":"queen-kafka","key":"qk:g"}]"#;
        let produce_only = batch(false, false);
        assert_eq!(run(BLOCKED, &[put]), Err(Refusal::PushBlocked));
        assert_eq!(run(GATED, &[br#"[{"op":"get"}]"#]), Err(Refusal::FeatureGated));
        assert_eq!(run(BLOCKED, &[b"{"]), Err(Refusal::UnreadableBody));
        assert!(run(BLOCKED, &[facade]).is_ok());
        assert!(run(GATED, &[facade]).is_ok());
        assert_eq!(run(produce_only, &[facade]), Err(Refusal::PushBlocked));
        assert_eq!(run(CYCLE, &[br#"{"push_items":[1]}"#]), Err(Refusal::PushBlocked));
        assert!(run(CYCLE, &[br#"{"push_items":[]}"#]).is_ok());
        assert_eq!(run(CYCLE, &[b"["]), Err(Refusal::UnreadableBody));
        let fits = [b' '; 98];
        assert!(run(BLOCKED, &[b"[]", &fits]).is_ok());
        assert_eq!(run(BLOCKED, &[b"[]", &[b' '; 99]]), Err(Refusal::BodyTooLarge));
    }
}
