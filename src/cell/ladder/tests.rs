use super::occupancy::{Caps, Measurement};
use super::*;

const TENANT: Uuid = Uuid::from_u128(7);

fn demand(operations: &[&str]) -> Demand {
    let mut demand = Demand::default();
    for name in operations {
        demand.add(name, 1, false);
    }
    demand
}

fn quota(tenant: Uuid) -> Quota {
    Quota {
        tenant,
        granted: true,
        enabled: true,
        caps: Caps::default(),
        reads: None,
        writes: None,
        measured: Measurement::default(),
    }
}

fn seconds(number: u64) -> Duration {
    Duration::from_secs(number)
}

/// How many of `most` calls in one instant pass, and why the next one does not.
fn passed(
    ladder: &Ladder,
    tenant: Uuid,
    operation: &str,
    now: Duration,
    most: usize,
) -> (usize, Option<Refusal>) {
    for count in 0..most {
        if let Err(refusal) = ladder.admit(tenant, &demand(&[operation]), now) {
            return (count, Some(refusal));
        }
    }
    (most, None)
}

#[test]
fn grants() {
    // What is in the side tables: no row, only a measurement, a quota, a quota that is switched off.
    let rows = [
        ("nothing", None),
        ("measured", Some(Quota { granted: false, ..quota(TENANT) })),
        ("granted", Some(quota(TENANT))),
        ("switched off", Some(Quota { enabled: false, ..quota(TENANT) })),
    ];
    // Whether a write passes with grants not required, and with them required.
    let expected = [[true, false], [true, false], [true, true], [false, false]];
    for ((name, row), expected) in rows.iter().zip(expected) {
        for (require_grant, expected) in [false, true].into_iter().zip(expected) {
            let ladder = Ladder::new(LadderSettings { require_grant, ..LadderSettings::default() });
            ladder.refresh(row.as_slice(), seconds(1));
            for (operations, needs_grant) in [
                (&["get"][..], false),
                (&["getMany", "getPrefix"], false),
                (&["delete"], false),
                (&["get", "delete"], false),
                (&["put"], true),
                (&["putIfAbsent"], true),
                (&["incr"], true),
                (&["delete", "put"], true),
            ] {
                let found = ladder.admit(TENANT, &demand(operations), seconds(1));
                let allowed = expected || !needs_grant;
                let expected = if allowed { Ok(()) } else { Err(Refusal::NotGranted) };
                assert_eq!(found, expected, "{name}, required: {require_grant}, {operations:?}");
            }
        }
    }
}

#[test]
fn each_tenant_has_a_rate_for_reads_and_one_for_writes() {
    let ladder = Ladder::new(LadderSettings { cell_rate: 0, ..LadderSettings::default() });
    let now = seconds(10);
    assert_eq!(passed(&ladder, TENANT, "get", now, 500).0, 400);
    let (writes, refusal) = passed(&ladder, TENANT, "delete", now, 500);
    assert_eq!((writes, refusal), (200, Some(Refusal::Rate(Duration::from_millis(10)))));
    assert_eq!(passed(&ladder, Uuid::from_u128(8), "put", now, 500).0, 200, "another tenant has its own");
    assert_eq!(passed(&ladder, TENANT, "put", seconds(11), 500).0, 100);
    assert_eq!(passed(&ladder, TENANT, "get", seconds(11), 500).0, 200);
}

#[test]
fn a_quota_replaces_rate_and_burst_from_the_next_refresh_on() {
    let ladder = Ladder::new(LadderSettings { cell_rate: 0, ..LadderSettings::default() });
    let rate = |number| Some(Rate { per_second: number, burst: number });
    ladder.refresh(&[Quota { writes: rate(3), ..quota(TENANT) }], seconds(1));
    assert_eq!(passed(&ladder, TENANT, "put", seconds(1), 500).0, 3);
    assert_eq!(passed(&ladder, TENANT, "put", seconds(2), 500).0, 3);
    assert_eq!(passed(&ladder, TENANT, "get", seconds(2), 500).0, 400, "reads have the cell's rate");
    ladder.refresh(&[], seconds(10));
    assert_eq!(passed(&ladder, TENANT, "put", seconds(10), 500).0, 200, "the row is gone");
}

#[test]
fn all_tenants_together_have_a_ceiling_that_a_greedy_one_does_not_use_up() {
    let ladder = Ladder::new(LadderSettings {
        cell_rate: 50,
        reads: Rate { per_second: 30, burst: 30 },
        ..LadderSettings::default()
    });
    let now = seconds(5);
    assert_eq!(passed(&ladder, TENANT, "get", now, 30).0, 30);
    // Refused by its own rate a thousand times over.
    for _ in 0..1000 {
        assert!(ladder.admit(TENANT, &demand(&["get"]), now).is_err());
    }
    let (count, refusal) = passed(&ladder, Uuid::from_u128(8), "get", now, 30);
    assert_eq!((count, refusal), (20, Some(Refusal::Rate(Duration::from_millis(20)))));
    // The ceiling's refusal cost the tenant nothing of its own.
    assert_eq!(passed(&ladder, Uuid::from_u128(8), "get", now + Duration::from_millis(200), 30).0, 10);
}

#[test]
fn a_cap_stops_what_adds_and_a_refund_gives_room() {
    let ladder = Ladder::new(LadderSettings::default());
    let capped = Quota { caps: Caps { rows: Some(10), bytes: None }, ..quota(TENANT) };
    ladder.refresh(std::slice::from_ref(&capped), seconds(1));
    assert_eq!(passed(&ladder, TENANT, "put", seconds(1), 10), (10, None));
    ladder.refund(TENANT, Usage { rows: 1, bytes: 1 });
    assert_eq!(passed(&ladder, TENANT, "incr", seconds(1), 2), (1, Some(Refusal::Full)));
    for operation in ["get", "delete"] {
        assert_eq!(passed(&ladder, TENANT, operation, seconds(1), 1), (1, None), "{operation}");
    }
    ladder.refund(Uuid::from_u128(99), Usage { rows: 1, bytes: 1 });
}

#[test]
fn strangers_are_bounded_and_those_with_a_row_are_not_counted() {
    let ladder = Ladder::new(LadderSettings { max_tenants: 3, cell_rate: 0, ..LadderSettings::default() });
    let known: Vec<Quota> = (100..110).map(|id| quota(Uuid::from_u128(id))).collect();
    ladder.refresh(&known, seconds(1));
    for id in 0..3 {
        assert_eq!(ladder.admit(Uuid::from_u128(id), &demand(&["get"]), seconds(1)), Ok(()));
    }
    assert_eq!(ladder.admit(Uuid::from_u128(3), &demand(&["get"]), seconds(1)), Err(Refusal::NoRoom));
    assert_eq!(ladder.admit(Uuid::from_u128(2), &demand(&["get"]), seconds(1)), Ok(()));
    assert_eq!(ladder.admit(Uuid::from_u128(105), &demand(&["get"]), seconds(1)), Ok(()));
    // One of them is busy still; the places of the two others are free again.
    ladder.admit(Uuid::from_u128(2), &demand(&["put"]), seconds(9)).unwrap();
    ladder.refresh(&known, seconds(9));
    assert_eq!(ladder.tenants.len(), 11);
    for (id, expected) in [(3, Ok(())), (4, Ok(())), (5, Err(Refusal::NoRoom))] {
        assert_eq!(ladder.admit(Uuid::from_u128(id), &demand(&["get"]), seconds(9)), expected);
    }
}

#[test]
fn hot_from_eighty_percent_of_any_cap() {
    let ladder = Ladder::new(LadderSettings::default());
    for (rows, bytes, expected) in [(7, 79, false), (8, 0, true), (0, 80, true), (0, 0, false)] {
        let quota = Quota {
            caps: Caps { rows: Some(10), bytes: Some(100) },
            measured: Measurement { usage: Usage { rows, bytes }, computed_at_ms: 1 },
            ..quota(TENANT)
        };
        ladder.refresh(&[quota], seconds(1));
        assert_eq!(ladder.is_hot(), expected, "{rows} rows, {bytes} bytes");
    }
}
