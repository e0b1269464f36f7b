//! bcrypt with pauses. One check takes tens of milliseconds; a thread that computes for so long keeps its core from
//! being idle, and only an idle core takes over what waits at another at once. Even in the idle class it then costs tenants'
//! requests milliseconds (`benches/RESULTS.md`), so it rests for a moment every half millisecond. No library's
//! bcrypt can be halted, hence the loop here; the cipher and the format are libraries'.

use base64::{
    Engine,
    alphabet::BCRYPT,
    engine::{GeneralPurpose, general_purpose::NO_PAD},
};
use blowfish::Blowfish;
use std::{
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};
use subtle::ConstantTimeEq;

/// Computing between two pauses.
const PIECE: Duration = Duration::from_micros(500);
/// A pause; what the kernel makes of it is somewhat longer.
const PAUSE: Duration = Duration::from_micros(50);

/// Costs there are.
const COSTS: RangeInclusive<u32> = 4..=31;
/// Bytes of a password that count, with the zero at its end.
const MAX_KEY: usize = 72;
/// Bytes of the digest that are kept.
const DIGEST: usize = 23;
/// What is enciphered, so many times over.
const PLAIN: &[u8; 24] = b"OrpheanBeholderScryDoubt";
const TIMES: usize = 64;

const BASE_64: GeneralPurpose = GeneralPurpose::new(&BCRYPT, NO_PAD);

/// A bcrypt hash as it is kept. Versions 2a, 2b and 2y differ in the prefix only; what 2x did to letters beyond ASCII is
/// not done, so such a password does not match.
pub(super) struct Hash {
    pub(super) cost: u32,
    salt: [u8; 16],
    digest: Vec<u8>,
}

impl Hash {
    /// Reads `$2b$10$…`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let parts: bcrypt::HashParts = text.parse().ok()?;
        let cost = Some(parts.get_cost()).filter(|cost| COSTS.contains(cost))?;
        let digest = text.rsplit('$').next()?.get(22..)?;
        let digest = BASE_64.decode(digest).ok().filter(|digest| digest.len() == DIGEST)?;
        Some(Self { cost, salt: parts.get_salt_raw(), digest })
    }

    /// Whether it is of this password.
    pub(super) fn is_of(&self, password: &str) -> bool {
        compute(self.cost, self.salt, password).ct_eq(&self.digest).into()
    }
}

/// The digest of a password, without the byte that bcrypt drops. What lies beyond 72 bytes does not count.
pub(super) fn compute(cost: u32, salt: [u8; 16], password: &str) -> [u8; DIGEST] {
    let mut key = [password.as_bytes(), &[0]].concat();
    key.truncate(MAX_KEY);
    let mut state: Blowfish = Blowfish::bc_init_state();
    state.salted_expand_key(&salt, &key);
    let mut began = Instant::now();
    for _ in 0..1_u64 << cost {
        state.bc_expand_key(&key);
        state.bc_expand_key(&salt);
        if began.elapsed() >= PIECE {
            thread::sleep(PAUSE);
            began = Instant::now();
        }
    }
    let mut digest = *PLAIN;
    let (blocks, _) = digest.as_chunks_mut::<8>();
    for block in blocks {
        let [left, right] = block.as_chunks_mut::<4>().0 else { continue };
        let mut both = [u32::from_be_bytes(*left), u32::from_be_bytes(*right)];
        for _ in 0..TIMES {
            both = state.bc_encrypt(both);
        }
        (*left, *right) = (both[0].to_be_bytes(), both[1].to_be_bytes());
    }
    let mut kept = [0; DIGEST];
    kept.copy_from_slice(&digest[..DIGEST]);
    kept
}

#[cfg(test)]
mod tests {
    use super::Hash;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn it_is_what_the_library_computes(
            password in prop_oneof!["[^\0]{0,12}", "[^\0]{60,80}", "[a-c]{71,73}"],
            other in "[^\0]{0,12}",
            cost in 4_u32..7,
            version in prop_oneof![Just("2a"), Just("2b"), Just("2y")],
        ) {
            let hash = bcrypt::hash_with_result(&password, cost).unwrap().to_string();
            let hash = hash.replace("$2b$", &format!("${version}$"));
            let parsed = Hash::parse(&hash).unwrap();
            prop_assert_eq!(parsed.cost, cost);
            prop_assert!(parsed.is_of(&password));
            prop_assert_eq!(parsed.is_of(&other), bcrypt::verify(&other, &hash).unwrap());
        }
    }

    #[test]
    fn what_is_no_hash() {
        let good = "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e";
        assert!(Hash::parse(good).is_some());
        for bad in [
            "",
            "secret",
            "$2a$04$",
            "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6",
            "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e.",
            "$2a$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc=e",
            "$2a$32$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e",
            "$2a$03$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e",
            "$1$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e",
            "$2a$04$éabcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc",
        ] {
            assert!(Hash::parse(bad).is_none(), "{bad}");
        }
    }
}
