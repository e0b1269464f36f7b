use super::{
    Destination, Heaviest, Messages, Retention, Unreadable, configure, cycle, ephemeral_push,
    naive::{self, Kind},
    push, replay, transaction,
};
use proptest::prelude::*;
use std::fmt::Write;

const MAX_PAIRS: usize = 100;

/// count, index and bytes of the heaviest, all bytes, pairs as `queue/partition`.
type Told<'t> = (u64, (u64, u64), u64, &'t [&'t str]);

fn assert_told(read: Result<Messages<'_>, Unreadable>, want: Told<'_>, body: &str) {
    let read = read.unwrap_or_else(|error| panic!("{error:?}: {body}"));
    let heaviest = read.heaviest.map_or((0, 0), |h: Heaviest| (h.index, h.bytes));
    let pairs: Vec<String> =
        read.pairs.list().iter().map(|pair| format!("{}/{}", pair.queue, pair.partition)).collect();
    assert_eq!(
        (read.count, heaviest, read.payload_bytes, pairs),
        { (want.0, want.1, want.2, want.3.iter().map(|&pair| pair.to_owned()).collect()) },
        "{body}"
    );
}

#[test]
fn pushes() {
    let cases: &[(&str, Told<'_>)] = &[
        (r#"{"items":[]}"#, (0, (0, 0), 0, &[])),
        (r#"{"items":[{"queue":"q","payload":{"a":1}}]}"#, (1, (0, 7), 7, &["q/Default"])),
        (r#"{"items":[{"queue":"q","partition":"p","payload":"x"}]}"#, (1, (0, 3), 3, &["q/p"])),
        // distinct lanes in the order first seen, the first of the heaviest
        (
            r#"{"items":[{"queue":"b","payload":1},{"queue":"a","payload":22},{"queue":"b","payload":33},{"queue":"a","payload":4}]}"#,
            (4, (1, 2), 6, &["b/Default", "a/Default"]),
        ),
        // blanks within a payload are part of it, blanks around it are not
        (
            "{ \"items\" :\t[ {\"queue\" : \"q\" , \"payload\" : [ 1 , 2 ] } ]\r\n}",
            (1, (0, 9), 9, &["q/Default"]),
        ),
        // absent parts
        (r#"{"items":[{"queue":"q"}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"items":[{"queue":"q","payload":null}]}"#, (1, (0, 4), 4, &["q/Default"])),
        (r#"{"items":[{"queue":"q","partition":null}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"items":[{"queue":"q","partition":""}]}"#, (1, (0, 0), 0, &["q/"])),
        (r#"{"items":[{}]}"#, (1, (0, 0), 0, &["/Default"])),
        (r#"{"items":[7,null,"x",[1]]}"#, (4, (0, 0), 0, &[])),
        (r"{}", (0, (0, 0), 0, &[])),
        (r#"{"items":null}"#, (0, (0, 0), 0, &[])),
        (r#"{"items":{"queue":"q"}}"#, (0, (0, 0), 0, &[])),
        (r#"{"other":{"items":[{}]}}"#, (0, (0, 0), 0, &[])),
        // a payload by its other name; the longer of the two
        (r#"{"items":[{"queue":"q","data":"xyz"}]}"#, (1, (0, 5), 5, &["q/Default"])),
        (r#"{"items":[{"queue":"q","data":"xyz","payload":1}]}"#, (1, (0, 5), 5, &["q/Default"])),
        // escapes in names and values
        (
            r#"{"it\u0065ms":[{"\u0071ueue":"\u0071","partition":"a\/b","p\u0061yload":"\n"}]}"#,
            (1, (0, 4), 4, &["q/a/b"]),
        ),
        (r#"{"items":[{"queue":"\ud83d\ude00","payload":"\"}]"}]}"#, (1, (0, 6), 6, &["😀/Default"])),
        (r#"{"items":[{"queue":"é\\","payload":"\\"}]}"#, (1, (0, 4), 4, &["é\\/Default"])),
        // lanes that are no strings: told apart as finely as they stand there
        (
            r#"{"items":[{"queue":"q","partition":5},{"queue":"q","partition":"5"},{"queue":"q","partition":true}]}"#,
            (3, (0, 0), 0, &["q/5", "q/true"]),
        ),
        (r#"{"items":[{"queue":5,"partition":{"a":[1]}}]}"#, (1, (0, 0), 0, &["5/{\"a\":[1]}"])),
        // numbers of any length
        (
            r#"{"items":[{"queue":"q","payload":123456789012345678901234567890.5e-400}]}"#,
            (1, (0, 37), 37, &["q/Default"]),
        ),
        // repeated members: both readings' lanes, the greatest payload and count
        (
            r#"{"items":[{"queue":"a","queue":"b","payload":"xxxx","payload":1}]}"#,
            (1, (0, 6), 6, &["a/Default", "b/Default"]),
        ),
        (
            r#"{"items":[{"queue":"a","partition":"1","queue":"b","partition":"2"}]}"#,
            (1, (0, 0), 0, &["a/1", "b/2"]),
        ),
        (r#"{"items":[{"queue":"a"},{"queue":"a"}],"items":[]}"#, (2, (0, 0), 0, &["a/Default"])),
        (r#"{"items":[],"items":[{"queue":"a"}]}"#, (1, (0, 0), 0, &["a/Default"])),
        (r#"{"items":[{"queue":"a"}],"items":7}"#, (1, (0, 0), 0, &["a/Default"])),
        // what no strict parser takes, but some lenient one might
        (r#"[{"queue":"q","payload":1}]"#, (1, (0, 1), 1, &["q/Default"])),
        ("\u{feff}{\"items\":[{\"queue\":\"q\"}]}", (1, (0, 0), 0, &["q/Default"])),
        ("\u{c}{\"items\":[{\"queue\":\"q\",},],}\0 more", (1, (0, 0), 0, &["q/Default"])),
        ("{\"items\":[{\"queue\":\"a\nb\"}]}", (1, (0, 0), 0, &["a\nb/Default"])),
        (r#"{"items":[{"queue":"\ud800"}]}"#, (1, (0, 0), 0, &["\\ud800/Default"])),
    ];
    for (body, want) in cases {
        assert_told(push(body.as_bytes(), MAX_PAIRS), *want, body);
    }
    let bytes = b"{\"items\":[{\"queue\":\"\xff\",\"payload\":\"\xc0\x80\"}]}";
    assert_told(push(bytes, MAX_PAIRS), (1, (0, 4), 4, &["\u{fffd}/Default"]), "not UTF-8");
}

#[test]
fn transactions() {
    let cases: &[(&str, Told<'_>)] = &[
        (
            r#"{"operations":[{"type":"push","items":[{"queue":"a","payload":1},{"queue":"b","data":22}]}]}"#,
            (2, (1, 2), 3, &["a/Default", "b/Default"]),
        ),
        (
            r#"{"operations":[{"type":"push","queue":"q","partition":"p","payload":1}]}"#,
            (1, (0, 1), 1, &["q/p"]),
        ),
        (r#"{"operations":[{"queue":"q","payload":1,"type":"push"}]}"#, (1, (0, 1), 1, &["q/Default"])),
        (
            r#"{"operations":[{"type":"ack","queue":"q","payload":1},{"type":"push","items":[{"queue":"q"}]}]}"#,
            (1, (0, 0), 0, &["q/Default"]),
        ),
        (
            r#"{"operations":[{"items":[{"queue":"q"}]},{"queue":"r"}]}"#,
            (2, (0, 0), 0, &["q/Default", "r/Default"]),
        ),
        (r#"{"operations":[{"type":"kv","op":"put"},{},7,null]}"#, (0, (0, 0), 0, &[])),
        (r#"{"operations":[{"type":"push"}]}"#, (1, (0, 0), 0, &["/Default"])),
        (r#"{"operations":[{"type":"push","items":null,"queue":"q"}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"operations":[{"type":"push","items":[],"queue":"q"}]}"#, (0, (0, 0), 0, &[])),
        (r#"{"operations":[{"type":"push","items":[7]}]}"#, (1, (0, 0), 0, &[])),
        // repeated members
        (r#"{"operations":[{"type":"ack","type":"push","queue":"q"}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"operations":[{"type":"push","type":"ack","queue":"q"}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"operations":[{"type":"ack","type":"ack","queue":"q"}]}"#, (0, (0, 0), 0, &[])),
        (
            r#"{"operations":[{"type":"push","items":[{"queue":"a"},{"queue":"a"}],"items":[{"queue":"b"}]}]}"#,
            (2, (0, 0), 0, &["a/Default", "b/Default"]),
        ),
        (
            r#"{"operations":[{"type":"push","items":[],"items":0,"queue":"q","payload":1}]}"#,
            (1, (0, 1), 1, &["q/Default"]),
        ),
        (
            r#"{"operations":[{"t\u0079pe":"p\u0075sh","queue":"q"}],"kv":[{"op":"put"}]}"#,
            (1, (0, 0), 0, &["q/Default"]),
        ),
    ];
    for (body, want) in cases {
        assert_told(transaction(body.as_bytes(), MAX_PAIRS), *want, body);
    }
}

#[test]
fn cycles() {
    let cases: &[(&str, Told<'_>)] = &[
        (
            r#"{"push_items":[{"queue":"a","payload":1},{"queue":"a","partition":"","data":"xy"}],"ack":{}}"#,
            (2, (1, 4), 5, &["a/Default"]),
        ),
        (r#"{"push_items":[{"queue":"","payload":1},{"payload":2},{"queue":null},7]}"#, (0, (0, 0), 0, &[])),
        (r#"{"push_items":[{"queue":"","queue":"q"}]}"#, (1, (0, 0), 0, &["q/Default"])),
        (r#"{"push_items":[{"queue":"q","partition":7}]}"#, (1, (0, 0), 0, &["q/7"])),
        (r#"{"push_items":null}"#, (0, (0, 0), 0, &[])),
    ];
    for (body, want) in cases {
        assert_told(cycle(body.as_bytes(), MAX_PAIRS), *want, body);
    }
}

#[test]
fn ephemeral_pushes() {
    let cases: &[(&str, Result<u64, Unreadable>)] = &[
        (r#"{"queue":"q","messages":[{"payload":1},2,[3]]}"#, Ok(3)),
        (r#"{"messages":[1],"messages":[1,2]}"#, Ok(2)),
        (r#"{"messages":{}}"#, Ok(0)),
        (r#"{"messages":[1"#, Err(Unreadable::NotJson)),
    ];
    for (body, want) in cases {
        assert_eq!(ephemeral_push(body.as_bytes()), *want, "{body}");
    }
}

#[test]
fn what_no_cell_reads_as_json() {
    let bodies: &[&str] = &[
        "",
        " ",
        "null",
        "7",
        "\"items\"",
        "{",
        "[",
        "{\"items\":[{\"queue\":\"q\"}]",
        "{\"items\":[{]}",
        "{\"items\":}",
        "{\"items\"}",
        "{items:[]}",
        "{\"items\":[\"",
        "{\"items\":[\"\\",
        "}",
        "{\"a\":\"\\\"}",
    ];
    for body in bodies {
        for read in [push, transaction, cycle] {
            assert_eq!(read(body.as_bytes(), 9).err(), Some(Unreadable::NotJson), "{body}");
        }
        assert_eq!(configure(body.as_bytes()).err(), Some(Unreadable::NotJson), "{body}");
    }
    assert_eq!(replay(b"7").err(), Some(Unreadable::NotJson));
    for body in [&b"QPB1\x01rest"[..], b"QTB1"] {
        assert_eq!(push(body, 9).err(), Some(Unreadable::Binary));
        assert_eq!(transaction(body, 9).err(), Some(Unreadable::Binary));
    }
}

#[test]
fn any_depth_is_walked_without_recursion() {
    let depth = 1_000_000;
    let body =
        format!(r#"{{"items":[{{"queue":"q","payload":{}{}}}]}}"#, "[".repeat(depth), "]".repeat(depth));
    let read = push(body.as_bytes(), 9).unwrap();
    assert_eq!((read.count, read.payload_bytes), (1, 2 * depth as u64));
}

#[test]
fn no_more_pairs_than_asked_for() {
    let items: Vec<String> = (0..50).map(|n| format!(r#"{{"queue":"q{}"}}"#, n % 20)).collect();
    let body = format!(r#"{{"items":[{}]}}"#, items.join(","));
    for (max, kept, overflow) in [(0, 0, true), (1, 1, true), (19, 19, true), (20, 20, false)] {
        let read = push(body.as_bytes(), max).unwrap();
        assert_eq!((read.count, read.pairs.list().len(), read.pairs.overflow()), (50, kept, overflow));
    }
}

#[test]
fn retention_that_a_configure_asks_for() {
    const R: &str = "retentionSeconds";
    const C: &str = "completedRetentionSeconds";
    // body, retentions, queues
    let cases: &[(&str, &[(&'static str, i64)], &[&str])] = &[
        (r#"{"queue":"q","options":{"retentionSeconds":60}}"#, &[(R, 60)], &["q"]),
        (r#"{"queue":"q","retentionSeconds":60}"#, &[(R, 60)], &["q"]),
        (r#"{"queue":"q","options":{},"retentionSeconds":60}"#, &[], &["q"]),
        (r#"{"queue":"q","options":7,"retentionSeconds":60}"#, &[(R, 60)], &["q"]),
        (r#"{"queue":"q","options":{},"options":null,"retentionSeconds":60}"#, &[(R, 60)], &["q"]),
        (r#"{"queue":"q","options":{"retentionSeconds":5},"options":{}}"#, &[(R, 5)], &["q"]),
        (r#"{"options":{"completedRetentionSeconds":"7","retentionSeconds":" 9 "}}"#, &[(R, 9), (C, 7)], &[]),
        (r#"{"queue":"","options":{"retentionSeconds":0,"completedRetentionSeconds":-1}}"#, &[], &[""]),
        (r#"{"queue":7,"options":{"retentionSeconds":null}}"#, &[], &[]),
        (
            r#"{"queue":"a","queue":"b","options":{"retentionSeconds":1,"retentionSeconds":3}}"#,
            &[(R, 3)],
            &["a", "b"],
        ),
        (r#"{"options":{"retention\u0053econds":"\u0037"}}"#, &[(R, 7)], &[]),
        // every spelling that some cell takes for an integer
        (r#"{"options":{"retentionSeconds":1e9}}"#, &[(R, 1_000_000_000)], &[]),
        (r#"{"options":{"retentionSeconds":1.5}}"#, &[(R, 2)], &[]),
        (r#"{"options":{"retentionSeconds":99999999999999999999}}"#, &[(R, i64::MAX)], &[]),
        (r#"{"options":{"retentionSeconds":1e400}}"#, &[(R, i64::MAX)], &[]),
        (r#"{"options":{"retentionSeconds":-99999999999999999999}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":"+1_000"}}"#, &[(R, 1_000)], &[]),
        (r#"{"options":{"retentionSeconds":"0xFF"}}"#, &[(R, 255)], &[]),
        (r#"{"options":{"retentionSeconds":"0o17"}}"#, &[(R, 15)], &[]),
        (r#"{"options":{"retentionSeconds":"0b11"}}"#, &[(R, 3)], &[]),
        (r#"{"options":{"retentionSeconds":"inf"}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":"NaN"}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":"0x"}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":""}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":"ten"}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":"é7"}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":true}}"#, &[], &[]),
        (r#"{"options":{"retentionSeconds":[60]}}"#, &[], &[]),
    ];
    for (body, retention, queues) in cases {
        let read = configure(body.as_bytes()).unwrap();
        let want: Vec<Retention> =
            retention.iter().map(|&(option, seconds)| Retention { option, seconds }).collect();
        assert_eq!(read.retention, want, "{body}");
        let named: Vec<&str> = read.pairs.list().iter().map(|pair| &*pair.queue).collect();
        assert_eq!(named, *queues, "{body}");
    }
}

#[test]
fn destinations_of_a_replay() {
    let cases: &[(&str, &str)] = &[
        ("", "origin"),
        (" \n", "origin"),
        ("{}", "origin"),
        (r#"{"queue":null,"partition":" "}"#, "origin"),
        (r#"{"queue":" q ","partition":"p\t"}"#, "q/p"),
        (r#"{"queue":"q\u0020","partition":"p"}"#, "q/p"),
        (r#"{"queue":"q"}"#, "half: partition"),
        (r#"{"partition":"p","queue":""}"#, "half: queue"),
        (r#"{"queue":"q","partition":5}"#, "q/5"),
        (r#"{"queue":"a","queue":"b","partition":"p"}"#, "a/p b/p"),
        (r#"{"queue":"a","partition":"p","partition":null}"#, "half: partition"),
        (r#"{"queue":"a","partition":"p","queue":null,"partition":null}"#, "a/p"),
    ];
    for (body, want) in cases {
        let told = match replay(body.as_bytes()).unwrap() {
            Destination::Origin => "origin".to_owned(),
            Destination::Half { missing } => format!("half: {missing}"),
            Destination::Named(pairs) => {
                let pairs: Vec<_> =
                    pairs.list().iter().map(|p| format!("{}/{}", p.queue, p.partition)).collect();
                pairs.join(" ")
            }
        };
        assert_eq!(told, *want, "{body}");
    }
}

/// A string as JSON writes it, some characters escaped though they need not be.
fn spelled(text: &str, escape: bool) -> String {
    if !escape {
        return serde_json::to_string(text).unwrap();
    }
    let mut spelled = String::from("\"");
    for unit in text.encode_utf16() {
        write!(spelled, "\\u{unit:04X}").unwrap();
    }
    spelled + "\""
}

fn payload() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        "-?[1-9][0-9]{0,30}",
        any::<String>().prop_map(|text| spelled(&text, false)),
        any::<String>().prop_map(|text| spelled(&text, true)),
    ];
    leaf.prop_recursive(4, 20, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|list| format!("[ {} ]", list.join(" ,"))),
            prop::collection::vec((any::<String>(), inner), 0..4).prop_map(|members| {
                let members: Vec<_> =
                    members.iter().map(|(name, value)| format!("{}:{value}", spelled(name, false))).collect();
                format!("{{{}}}", members.join(","))
            }),
        ]
    })
}

proptest! {
    /// What the generator put in is what is told: no more, no less.
    #[test]
    fn plain_pushes_are_counted_exactly(
        items in prop::collection::vec(
            ("[a-cé\"]{0,2}", prop::option::of("[x-z\\\\]{0,2}"), payload(), any::<bool>(), any::<bool>()),
            0..20,
        ),
    ) {
        let mut texts = Vec::new();
        let (mut bytes, mut pairs) = (0, Vec::new());
        for (queue, partition, payload, escape, payload_first) in &items {
            let mut members = vec![format!("{} : {}", spelled("queue", *escape), spelled(queue, *escape))];
            if let Some(partition) = partition {
                members.push(format!("\"partition\":{}", spelled(partition, *escape)));
            }
            let at = if *payload_first { 0 } else { members.len() };
            members.insert(at, format!("\"payload\": {payload} "));
            texts.push(format!("{{{}}}", members.join(",")));
            bytes += payload.len() as u64;
            let pair = (queue.clone(), partition.clone().unwrap_or_else(|| "Default".to_owned()));
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
        let list = texts.join(", ");
        let bodies = [
            (Kind::Push, format!(r#"{{"items":[{list}]}}"#)),
            (Kind::Transaction, format!(r#"{{"operations":[{{"type":"ack"}},{{"items":[{list}],"type":"push"}}]}}"#)),
        ];
        for (kind, body) in bodies {
            let read = if matches!(kind, Kind::Push) { push } else { transaction };
            let told = read(body.as_bytes(), MAX_PAIRS).unwrap();
            prop_assert_eq!(told.count, items.len() as u64);
            prop_assert_eq!(told.payload_bytes, bytes);
            let heaviest = items.iter().map(|item| item.2.len() as u64).max();
            prop_assert_eq!(told.heaviest.map(|heaviest| heaviest.bytes), heaviest);
            let told: Vec<_> = told.pairs.list().iter()
                .map(|pair| (pair.queue.clone().into_owned(), pair.partition.clone().into_owned())).collect();
            prop_assert_eq!(&told, &pairs);
            // And the plain parser agrees, so that it is worth comparing with.
            let naive = naive::read(body.as_bytes(), kind).unwrap();
            prop_assert_eq!((naive.count, naive.payload_bytes), (items.len() as u64, bytes));
            prop_assert_eq!(naive.pairs.len(), pairs.len());
        }
    }

    /// Odd bodies: members repeated, of the wrong kind, in any order. Never less than the plain parser.
    #[test]
    fn never_less_than_the_plain_parser(body in odd_body()) {
        for (kind, read) in
            [(Kind::Push, push as fn(_, _) -> _), (Kind::Transaction, transaction), (Kind::Cycle, cycle)]
        {
            if let Some(naive) = naive::read(body.as_bytes(), kind) {
                let told: Result<Messages<'_>, Unreadable> = read(body.as_bytes(), 10_000);
                naive.assert_covered_by(&told.expect("what serde_json reads is readable"));
            }
        }
    }

    #[test]
    fn nothing_panics(body in prop::collection::vec(any::<u8>(), 0..200), text in "[\\[\\]{}\":, \\\\a]{0,60}") {
        for body in [body.as_slice(), text.as_bytes()] {
            let _ = (push(body, 3), transaction(body, 3), cycle(body, 3));
            let _ = (ephemeral_push(body), configure(body), replay(body));
        }
    }
}

fn odd_body() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec![
        "items",
        "operations",
        "push_items",
        "queue",
        "partition",
        "payload",
        "data",
        "type",
        "push",
        "ack",
        "x",
    ]);
    let leaf = prop_oneof![
        4 => (name.clone(), any::<bool>()).prop_map(|(name, escape)| spelled(name, escape)),
        1 => Just("null".to_owned()),
        1 => Just("12345678901234567890123".to_owned()),
        1 => Just("\"\"".to_owned()),
    ];
    let value = leaf.prop_recursive(5, 60, 6, move |inner| {
        let member = (name.clone(), any::<bool>(), inner.clone())
            .prop_map(|(name, escape, value)| format!("{}: {value}", spelled(name, escape)));
        prop_oneof![
            prop::collection::vec(inner, 0..6).prop_map(|list| format!("[{}]", list.join(","))),
            prop::collection::vec(member, 0..8).prop_map(|members| format!("{{{}}}", members.join(" ,"))),
        ]
    });
    // The lists that matter, with anything in them, and more of anything around.
    let list = prop::sample::select(vec!["items", "operations", "push_items"]);
    prop::collection::vec((list, value.clone()), 1..4).prop_map(|members| {
        let members: Vec<_> = members.iter().map(|(name, value)| format!("\"{name}\":[{value}]")).collect();
        format!("{{{}}}", members.join(","))
    })
}
