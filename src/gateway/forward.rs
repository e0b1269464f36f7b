//! What goes to the cell: the peer, the time it has, and the headers (D11, proxy contract §11–§12).

use super::{head::Target, spans::Begun};
use crate::{
    config::proxy::Timeouts,
    domain::{
        cluster::{Cluster, Principal},
        ids::RequestId,
    },
    limits::ClusterLimits,
    metering::sample::MeteredRoute,
    policy::route,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Uri,
    header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, EXPECT, HOST},
    request::Parts,
    uri::PathAndQuery,
};
use ipnet::IpNet;
use pingora::{http::RequestHeader, prelude::HttpPeer};
use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

/// The right to be forwarded: only the checks make one, from what each of them yields.
pub(super) struct Forward {
    pub cluster: Arc<Cluster>,
    /// On whose behalf, for the log.
    pub principal: Principal,
    pub budget: Duration,
    /// What counts against the caps.
    pub counters: Arc<ClusterLimits>,
    /// A pop that waits at the cell for messages.
    pub parks: bool,
    /// What its answer is counted as.
    pub metered: MeteredRoute,
}

/// How long the cell has for its response headers: what a long poll asked for, up to the cap, plus
/// the margin; the ordinary budget otherwise.
pub(super) fn budget(target: Target<'_>, timeouts: &Timeouts) -> Duration {
    match route::long_poll_wait_ms(target.path, target.query) {
        Some(wait) => Duration::from_millis(wait).min(timeouts.longpoll_max) + timeouts.longpoll_margin,
        None => timeouts.upstream,
    }
}

impl Forward {
    /// The peer for the given try; each try takes the cell's next address.
    pub fn peer(&self, attempt: usize, timeouts: &Timeouts) -> Option<HttpPeer> {
        let addresses = &self.cluster.cell.addresses;
        let address = *addresses.get(attempt % addresses.len().max(1))?;
        let mut peer = HttpPeer::new(address, false, String::new());
        peer.options.connection_timeout = Some(timeouts.connect);
        peer.options.total_connection_timeout = Some(timeouts.connect);
        peer.options.read_timeout = Some(self.budget);
        peer.options.write_timeout = Some(timeouts.upstream);
        peer.options.idle_timeout = Some(timeouts.upstream_idle);
        Some(peer)
    }
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// Whether the client came by https.
pub(super) const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// The id of the request, in all directions.
pub(super) const X_QUEEN_REQUEST_ID: HeaderName = HeaderName::from_static("x-queen-request-id");
const X_QUEEN_TENANT: HeaderName = HeaderName::from_static("x-queen-tenant");

/// What the proxy knows of the client's side of the request.
pub(super) struct ClientSide<'r> {
    pub id: RequestId,
    pub peer: Option<SocketAddr>,
    /// Whether TLS protects the connection.
    pub https: bool,
    pub host: Option<&'r str>,
    pub trusted: &'r [IpNet],
}

impl ClientSide<'_> {
    /// Whether the peer is a proxy whose `X-Forwarded-*` count.
    fn is_trusted(&self) -> bool {
        trusts(self.trusted, self.peer)
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// The client's own address: the nearest in the chain that is no proxy we trust. What is behind it
    /// anybody may have written.
    pub fn address(&self, headers: &HeaderMap) -> Option<IpAddr> {
        let peer = unmapped(self.peer?.ip());
        if !self.is_trusted() {
            return Some(peer);
        }
        let lines = headers.get_all(X_FORWARDED_FOR).iter().rev();
        // By bytes: what is at the far end of the chain may be anything.
        let chain = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
        let mut nearest = peer;
        for entry in chain {
            let Some(address) = forwarded_address(entry) else { break };
            nearest = unmapped(address);
            if !self.trusts(nearest) {
                break;
            }
        }
        Some(nearest)
    }
}

/// Whether a peer is one of these networks.
pub(super) fn trusts(networks: &[IpNet], peer: Option<SocketAddr>) -> bool {
    peer.is_some_and(|peer| networks.iter().any(|network| network.contains(&unmapped(peer.ip()))))
}

/// What of a request decides its head at the cell.
pub(super) struct ToCell<'r> {
    pub target: Target<'r>,
    pub cluster: &'r Cluster,
    pub client: ClientSide<'r>,
    /// Whether the cell is told whose request it is.
    pub tenant_header: bool,
    /// Messages in a compressed answer could not be counted.
    pub uncompressed: bool,
    /// The length of a body that is here as a whole, which the client may have sent in chunks.
    pub whole: Option<usize>,
    /// Of a request with one: the parent of the cell's.
    pub span: Option<&'r Begun>,
}

/// Rewrites the head: what the client may not say is removed, then ours is set. The names of the result are in lower
/// case, as in HTTP/2: keeping two spellings of each name would double the work.
pub(super) fn rewrite(head: &mut RequestHeader, to: &ToCell<'_>) -> Option<()> {
    let uri = upstream_uri(&head.uri, to.target, &to.cluster.cell.path_prefix)?;
    let nothing = RequestHeader::from(http::Request::new(()).into_parts().0);
    let mut parts = Parts::from(std::mem::replace(head, nothing));
    parts.uri = uri;
    rewrite_headers(&mut parts.headers, to)?;
    *head = RequestHeader::from(parts);
    Some(())
}

fn rewrite_headers(headers: &mut HeaderMap, to: &ToCell<'_>) -> Option<()> {
    let client = &to.client;
    let trusted = client.is_trusted();
    let forwarded_for = forwarded_for(headers, client.peer, trusted);
    let kept = |headers: &HeaderMap, name: HeaderName| {
        if trusted { headers.get(name).cloned() } else { None }
    };
    let proto = kept(headers, X_FORWARDED_PROTO).unwrap_or(HeaderValue::from_static(if client.https {
        "https"
    } else {
        "http"
    }));
    let forwarded_host = kept(headers, X_FORWARDED_HOST)
        .or_else(|| client.host.and_then(|host| HeaderValue::from_str(host).ok()));

    // The credential is nearly always there, and the rest nearly never.
    headers.remove(AUTHORIZATION);
    strip(headers, is_ours);

    let cell = &to.cluster.cell;
    headers.insert(HOST, cell.host.clone());
    if let Some(bearer) = &cell.bearer {
        headers.insert(AUTHORIZATION, bearer.clone());
    }
    if to.tenant_header {
        headers.insert(X_QUEEN_TENANT, to.cluster.tenant_header.clone());
    }
    headers.insert(X_QUEEN_REQUEST_ID, id_value(client.id));
    if let Some(value) = forwarded_for {
        headers.insert(X_FORWARDED_FOR, HeaderValue::try_from(value).ok()?);
    }
    headers.insert(X_FORWARDED_PROTO, proto);
    if let Some(value) = forwarded_host {
        headers.insert(X_FORWARDED_HOST, value);
    }
    if let Some(span) = to.span {
        span.tell(headers);
    }
    if to.uncompressed {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    if let Some(length) = to.whole {
        // We have said "go on" ourselves.
        headers.remove(EXPECT);
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    Some(())
}

/// Takes away the headers of these names.
pub(super) fn strip(headers: &mut HeaderMap, is_banned: impl Fn(&str) -> bool) {
    let banned: Vec<HeaderName> = headers.keys().filter(|name| is_banned(name.as_str())).cloned().collect();
    for name in &banned {
        headers.remove(name);
    }
}

/// The id of a request as a header's value.
pub(super) fn id_value(id: RequestId) -> HeaderValue {
    let mut buffer = [0; uuid::fmt::Hyphenated::LENGTH];
    // Hexadecimal digits and hyphens are fit for every header.
    HeaderValue::from_str(id.text(&mut buffer)).unwrap_or(HeaderValue::from_static(""))
}

/// Headers that only the proxy speaks towards a cell. Some programs behind us take `_` for `-` in
/// names, so both spellings go.
fn is_ours(name: &str) -> bool {
    let plain: String;
    let name = if name.contains('_') {
        plain = name.replace('_', "-");
        &plain
    } else {
        name
    };
    matches!(
        name,
        "authorization"
            | "cookie"
            | "forwarded"
            | "x-real-ip"
            | "proxy-authorization"
            | "proxy-connection"
            | "keep-alive"
            | "te"
            | "trailer"
            | "upgrade"
            | "http2-settings"
    ) || name.starts_with("x-queen-")
        || name.starts_with("x-forwarded-")
}

/// The chain a trusted proxy handed us plus that proxy, or the client alone.
fn forwarded_for(headers: &HeaderMap, peer: Option<SocketAddr>, trusted: bool) -> Option<String> {
    let peer = unmapped(peer?.ip()).to_string();
    if !trusted {
        return Some(peer);
    }
    let lines = headers.get_all(X_FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
    Some(lines.chain([peer.as_str()]).collect::<Vec<_>>().join(", "))
}

/// An entry of `X-Forwarded-For`; some proxies add the port, or brackets.
fn forwarded_address(entry: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(entry.trim_ascii()).ok()?;
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some(address.ip());
    }
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text).parse().ok()
}

/// An IPv4 client of a dual-stack listener under its usual name.
fn unmapped(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// What the cell is asked for: `asked` itself where it is no more than the target.
fn upstream_uri(asked: &Uri, target: Target<'_>, prefix: &str) -> Option<Uri> {
    if prefix.is_empty() && asked.authority().is_none() {
        return Some(asked.clone());
    }
    let path_and_query: PathAndQuery = match target.query {
        Some(query) => format!("{prefix}{}?{query}", target.path),
        None => format!("{prefix}{}", target.path),
    }
    .parse()
    .ok()?;
    Some(Uri::from(path_and_query))
}

#[cfg(test)]
mod tests {
    use super::{ClientSide, Target, budget, is_ours, upstream_uri};
    use crate::{config::proxy::ProxyConfig, domain::ids::RequestId};
    use http::{HeaderMap, HeaderValue};
    use std::time::Duration;

    #[test]
    fn what_a_client_may_not_say() {
        for name in [
            "authorization",
            "cookie",
            "forwarded",
            "x-queen-tenant",
            "x_queen_tenant",
            "x-queen_tenant",
            "x-queen-act-cluster",
            "x-queen-request-id",
            "x-queen-anything",
            "x-forwarded-for",
            "x_forwarded_for",
            "x-forwarded-prefix",
            "te",
        ] {
            assert!(is_ours(name), "{name}");
        }
        for name in
            ["content-type", "accept-encoding", "user-agent", "x-request-id", "traceparent", "x-queens"]
        {
            assert!(!is_ours(name), "{name}");
        }
    }

    #[test]
    fn the_nearest_address_that_is_no_proxy_of_ours_is_the_clients() {
        let trusted = ["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()];
        let address = |peer: &str, lines: &[&[u8]]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("x-forwarded-for", HeaderValue::from_bytes(line).unwrap());
            }
            let peer = Some(peer.parse().unwrap());
            let client =
                ClientSide { id: RequestId::new(), peer, host: None, https: false, trusted: &trusted };
            client.address(&headers).unwrap().to_string()
        };
        let cases: &[(&str, &[&[u8]], &str)] = &[
            ("192.0.2.1:5", &[b"198.51.100.1"], "192.0.2.1"),
            ("10.0.0.1:5", &[], "10.0.0.1"),
            ("10.0.0.1:5", &[b"198.51.100.1"], "198.51.100.1"),
            ("[::ffff:10.0.0.1]:5", &[b"::ffff:198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"198.51.100.1:4711"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"[2001:db8::1]:4711"], "2001:db8::1"),
            ("10.0.0.1:5", &[b"[2001:db8::1]"], "2001:db8::1"),
            ("10.0.0.1:5", &[b"2001:db8::1"], "2001:db8::1"),
            ("10.0.0.1:5", &[b"1.1.1.1, 198.51.100.1 , 10.2.2.2:80,[fd00::1]:80"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"1.1.1.1", b"198.51.100.1, 10.2.2.2"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"\xff, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"\xff\xff", b"198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1:5", &[b"198.51.100.1, \xff, 10.2.2.2"], "10.2.2.2"),
            ("10.0.0.1:5", &[b"198.51.100.1, unknown"], "10.0.0.1"),
        ];
        for (peer, lines, want) in cases {
            assert_eq!(address(peer, lines), *want, "{peer} {lines:?}");
        }
    }

    #[test]
    fn budgets() {
        let environment = [("PXDB_HOST".to_owned(), "x".to_owned())];
        let timeouts = ProxyConfig::load(environment, None).unwrap().0.timeouts;
        let of = |path, query| budget(Target { path, query }, &timeouts);
        let pop = "/api/v1/pop/queue/q";
        assert_eq!(of(pop, None), Duration::from_secs(35));
        assert_eq!(of(pop, Some("wait=true")), Duration::from_secs(40));
        assert_eq!(of(pop, Some("wait=true&timeout=5000")), Duration::from_secs(15));
        assert_eq!(of(pop, Some("wait=true&timeout=600000")), Duration::from_secs(100));
        assert_eq!(of(pop, Some("wait=true&timeout=18446744073709551615")), Duration::from_secs(100));
    }

    #[test]
    fn the_target_is_forwarded_byte_for_byte() {
        for path in ["/api/v1/kv/ns/a%2Fb", "/api/v1/kv/ns/a//b", "/api/v1/kv/ns/%C3%A9;x"] {
            for query in [None, Some(""), Some("a=%20b&c=?/")] {
                let want = query.map_or(path.to_owned(), |query| format!("{path}?{query}"));
                let target = Target { path, query };
                let there = |asked: &str, prefix| {
                    upstream_uri(&asked.parse().unwrap(), target, prefix).unwrap().to_string()
                };
                assert_eq!(there(&want, ""), want);
                assert_eq!(there(&want, "/base"), format!("/base{want}"));
                assert_eq!(there(&format!("http://acme.q.example{want}"), ""), want);
            }
        }
    }
}
