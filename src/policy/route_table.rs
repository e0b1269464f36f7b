//! The route table as data: every row of contract §R with its neighbours.

use super::{Effect, RouteClass, classify, is_data_plane, long_poll_wait_ms};
use http::Method;

const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "get"];

/// The class in one word, for the table below.
fn word(class: RouteClass) -> String {
    match class {
        RouteClass::Produce => "produce".into(),
        RouteClass::Consume => "consume".into(),
        RouteClass::QueueAdmin { replays: false } => "queue-admin".into(),
        RouteClass::QueueAdmin { replays: true } => "replay".into(),
        RouteClass::Read => "read".into(),
        RouteClass::Operator => "operator".into(),
        RouteClass::Blocked => "blocked".into(),
        RouteClass::Gated(feature, effect) => {
            let effect = match effect {
                Effect::Read => "read",
                Effect::Grow => "grow",
                Effect::Open => "open",
                Effect::Mixed => "mixed",
            };
            format!("{}:{effect}", feature.key())
        }
    }
}

/// path | class by method; `*` is every method not named; methods not named at all are blocked.
const TABLE: &str = "
/api/v1/status                          | *=operator
/api/v1/status/buffers                  | *=operator
/api/v1/analytics/system-metrics        | *=operator
/api/v1/analytics/worker-metrics        | *=operator
/api/v1/analytics/postgres-stats        | *=operator
/api/v1/system/maintenance              | *=operator
/api/v1/system/maintenance/pop          | *=operator
/metrics/prometheus                     | *=operator
/api/v1/migration                       |
/api/v1/migration/export                |
/api/v1/migrations                      |
/api/v1/system                          |
/api/v1/system/kv-timers                |
/api/v1/system/maintenance/             |
/internal                               |
/internal/api                           |
/api/v1/stats/refresh                   |
/metrics                                |
/status                                 |
/api/v1/pop                             |
/api/v1/pop/                            |
/api/v1/push                            | *=produce
/api/v1/transaction                     | *=produce
/api/v1/push/                           |
/api/v1/Push                            |
/api/v1/pus%68                          |
/api/v1/pushx                           |
/api/v1/pop/queue/q                     | *=consume
/api/v1/pop/queue/q/partition/p         | *=consume
/api/v1/pop/queue                       |
/api/v1/ack                             | *=consume
/api/v1/ack/batch                       | *=consume
/api/v1/ack/other                       |
/api/v1/lease/1/extend                  | *=consume
/api/v1/lease                           |
/api/v1/fetch                           | POST=consume
/api/v1/fetch/                          |
/api/v1/partitions/changed              | POST=consume
/api/v1/configure                       | *=queue-admin
/api/v1/configure/                      |
/api/v1/resources/queues/q              | DELETE=queue-admin GET=read HEAD=read
/api/v1/resources/queues                | GET=read HEAD=read
/api/v1/messages/P/T/retry              | POST=replay
/api/v1/messages/P/retry                | GET=read HEAD=read DELETE=queue-admin
/api/v1/messages/P/T/retry/             | GET=read HEAD=read DELETE=queue-admin
/api/v1/messages/P/T/RETRY              | GET=read HEAD=read DELETE=queue-admin
/api/v1/messages/P/T/U/retry            | GET=read HEAD=read DELETE=queue-admin
/api/v1/messages                        | GET=read HEAD=read
/api/v1/messages/P/T                    | GET=read HEAD=read DELETE=queue-admin
/api/v1/messagesx                       |
/api/v1/dlq/7/replay                    | POST=replay
/api/v1/dlq/7/8/replay                  | GET=read HEAD=read
/api/v1/dlq/replay                      | GET=read HEAD=read
/api/v1/dlq                             | DELETE=queue-admin GET=read HEAD=read
/api/v1/dlqx                            |
/api/v1/consumer-groups                 | DELETE=queue-admin POST=queue-admin GET=read HEAD=read
/api/v1/consumer-groups/g/seek          | DELETE=queue-admin POST=queue-admin GET=read HEAD=read
/api/v1/consumer-groupsx                |
/streams/v1/cycle                       | POST=streams:mixed *=streams:open
/streams/v1/queries                     | *=streams:open
/streams                                |
/api/v1/traces                          | POST=traces:open GET=read HEAD=read
/api/v1/traces/t                        | GET=read HEAD=read
/api/v1/kv                              | POST=kv:mixed
/api/v1/kv/                             | POST=kv:mixed
/api/v1/kv/ns/key                       | GET=kv:read PUT=kv:grow DELETE=kv:open
/api/v1/kv/ns/a//b                      | GET=kv:read PUT=kv:grow DELETE=kv:open
/api/v1/kvstore                         |
/api/v1/timers                          | POST=timers:mixed
/api/v1/timers/                         | POST=timers:mixed
/api/v1/timers/ns/t                     | GET=timers:read DELETE=timers:open
/api/v1/timersx                         |
/api/v1/ephemeral/push                  | POST=ephemeral:grow
/api/v1/ephemeral/ack                   | POST=ephemeral:open
/api/v1/ephemeral/configure             | POST=ephemeral:open
/api/v1/ephemeral/reset                 | POST=ephemeral:open
/api/v1/ephemeral/pop                   | GET=ephemeral:open
/api/v1/ephemeral/queues                | GET=ephemeral:read
/api/v1/ephemeral/queues/q/depth        | GET=ephemeral:read
/api/v1/ephemeral/queues/q              |
/api/v1/ephemeral/queue/q               | DELETE=ephemeral:open
/api/v1/ephemeral/other                 |
/api/v1/ephemeral/                      |
/api/v1/ephemeral                       |
/api/v1/resources                       | GET=read HEAD=read
/api/v1/resources/overview              | GET=read HEAD=read
/api/v1/resources/kv/list               | GET=read HEAD=read POST=read
/api/v1/resources/kv/namespaces         | GET=read HEAD=read
/api/v1/resourcesx                      |
/api/v1/status/queues                   | GET=read HEAD=read
/api/v1/statusx                         |
/api/v1/analytics/queue-lag             | GET=read HEAD=read
/api/v1/analyticsx                      |
/api/v2/push                            |
/api/                                   |
/api/v1                                 |
/health                                 | GET=read HEAD=read
";

#[test]
fn every_row_of_the_route_table() {
    let mut rows = 0;
    for line in TABLE.lines().filter(|line| !line.is_empty()) {
        let (path, classes) = line.split_once('|').unwrap();
        let path = path.trim();
        let class_of = |method: &str| {
            let pick = |wanted: &str| {
                classes.split_whitespace().find_map(|pair| {
                    pair.split_once('=').filter(|(m, _)| *m == wanted).map(|(_, class)| class)
                })
            };
            pick(method).or_else(|| pick("*")).unwrap_or("blocked")
        };
        for method in METHODS {
            let got = classify(&Method::from_bytes(method.as_bytes()).unwrap(), path);
            assert_eq!(word(got), class_of(method), "{method} {path}");
            rows += 1;
        }
    }
    assert!(rows > 600, "the table was read: {rows}");
}

#[test]
fn what_reaches_the_classifier() {
    for path in [
        "/api/v1/push",
        "/api/",
        "/streams/x",
        "/internal/x",
        "/health",
        "/status",
        "/metrics",
        "/metrics/prometheus",
    ] {
        assert!(is_data_plane(path), "{path}");
    }
    for path in
        ["/", "/healthz", "/apix", "/api", "/auth/login", "/console", "/metrics/x", "/streams", "/health/"]
    {
        assert!(!is_data_plane(path), "{path}");
    }
}

#[test]
fn long_polls_are_told_by_their_query() {
    let pop = "/api/v1/pop/queue/q";
    let cases: &[(&str, Option<&str>, Option<u64>)] = &[
        (pop, Some("wait=true&timeout=1500"), Some(1500)),
        (pop, Some("timeout=1500&wait=true"), Some(1500)),
        (pop, Some("wait=true"), Some(30_000)),
        (pop, Some("wait=true&timeout=soon"), Some(30_000)),
        (pop, Some("wait=true&timeout=-1"), Some(30_000)),
        (pop, Some("wait=True"), None),
        (pop, Some("wait=1"), None),
        (pop, Some("nowait=true"), None),
        (pop, Some("wait=%74rue"), None),
        (pop, None, None),
        ("/api/v1/ephemeral/pop", Some("wait=true&timeout=9"), Some(9)),
        ("/api/v1/fetch", Some("wait=true"), None),
        ("/api/v1/push", Some("wait=true"), None),
    ];
    for (path, query, want) in cases {
        assert_eq!(long_poll_wait_ms(path, *query), *want, "{path} {query:?}");
    }
}
