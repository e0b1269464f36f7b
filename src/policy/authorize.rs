//! Who may do what (proxy contract §5, the authorization matrix).

use super::route::{Effect, RouteClass};
use crate::domain::scopes::{Role, Scopes};

/// Whether a key with these scopes may use a route of this class. `Operator` and `Blocked` are
/// never for keys.
pub fn key_may(scopes: Scopes, class: RouteClass) -> bool {
    match class {
        RouteClass::Produce => scopes.produce,
        RouteClass::Consume => scopes.consume,
        RouteClass::QueueAdmin { .. } => scopes.admin,
        RouteClass::Read => scopes.read || scopes.admin,
        RouteClass::Gated(_, Effect::Read) => scopes != Scopes::default(),
        RouteClass::Gated(..) => scopes.produce || scopes.consume,
        RouteClass::Operator | RouteClass::Blocked => false,
    }
}

/// Whether a user with this role on the cluster may use a route of this class. `Operator` routes
/// need a live operator, which is decided elsewhere.
pub fn role_may(role: Role, class: RouteClass) -> bool {
    match class {
        RouteClass::Produce => matches!(role, Role::Admin | Role::Producer),
        RouteClass::Consume => matches!(role, Role::Admin | Role::Consumer),
        RouteClass::QueueAdmin { .. } => role == Role::Admin,
        RouteClass::Read | RouteClass::Gated(_, Effect::Read) => true,
        RouteClass::Gated(..) => role != Role::Viewer,
        RouteClass::Operator | RouteClass::Blocked => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{key_may, role_may};
    use crate::{
        domain::{
            features::Feature,
            scopes::{Role, Scopes},
        },
        policy::route::{Effect, RouteClass},
    };

    /// class | scopes any one of which opens it | roles that open it
    fn matrix() -> Vec<(RouteClass, &'static str, &'static str)> {
        let mut rows = vec![
            (RouteClass::Produce, "produce", "admin producer"),
            (RouteClass::Consume, "consume", "admin consumer"),
            (RouteClass::QueueAdmin { replays: false }, "admin", "admin"),
            (RouteClass::QueueAdmin { replays: true }, "admin", "admin"),
            (RouteClass::Read, "read admin", "admin producer consumer viewer"),
            (RouteClass::Operator, "", ""),
            (RouteClass::Blocked, "", ""),
        ];
        for feature in Feature::ALL {
            rows.push((
                RouteClass::Gated(feature, Effect::Read),
                "produce consume admin read",
                "admin producer consumer viewer",
            ));
            for effect in [Effect::Grow, Effect::Open, Effect::Mixed] {
                rows.push((RouteClass::Gated(feature, effect), "produce consume", "admin producer consumer"));
            }
        }
        rows
    }

    #[test]
    fn every_row_of_the_authorization_matrix() {
        const SCOPES: [&str; 4] = ["produce", "consume", "admin", "read"];
        for (class, scopes, roles) in matrix() {
            // All sixteen sets of scopes, not only the single ones.
            for bits in 0..16 {
                let held: Vec<&str> =
                    (0..4).filter(|bit| bits & (1 << bit) != 0).map(|bit| SCOPES[bit]).collect();
                let want = held.iter().any(|scope| scopes.split(' ').any(|s| s == *scope));
                assert_eq!(
                    key_may(Scopes::from_words(held.iter().copied()), class),
                    want,
                    "{class:?} with {held:?}"
                );
            }
            for word in ["admin", "producer", "consumer", "viewer"] {
                let want = roles.split(' ').any(|role| role == word);
                assert_eq!(role_may(Role::parse(word).unwrap(), class), want, "{class:?} as {word}");
            }
        }
        assert_eq!(Role::parse("owner"), None);
        assert_eq!(Scopes::from_words(["operator", "*"]), Scopes::default());
    }
}
