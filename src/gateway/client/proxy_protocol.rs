//! The PROXY protocol, versions 1 and 2: what a balancer says of its client before anything else.

use std::{
    io::{Error, ErrorKind, Result},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};
use tokio::io::{AsyncRead, AsyncReadExt};

/// The least that any header has.
const BEGINNING: usize = 12;
const SIGNATURE: [u8; BEGINNING] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Longest line of version 1, with its end.
const MAX_LINE: usize = 107;
/// Longest block of addresses and extensions of version 2.
const MAX_BLOCK: usize = 2048;

/// What a header says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Told {
    /// Whose connection it is.
    Client(SocketAddr),
    /// The balancer speaks for itself, or does not know.
    Nobody,
}

/// Reads the header and not a byte more.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Result<Told> {
    let mut beginning = [0; BEGINNING];
    stream.read_exact(&mut beginning).await?;
    if beginning == SIGNATURE {
        let mut rest = [0; 4];
        stream.read_exact(&mut rest).await?;
        let [command, family, high, low] = rest;
        let mut block = vec![0; usize::from(u16::from_be_bytes([high, low]))];
        if block.len() > MAX_BLOCK {
            return Err(malformed());
        }
        stream.read_exact(&mut block).await?;
        return binary(command, family, &block).ok_or_else(malformed);
    }
    let mut line = beginning.to_vec();
    while !line.ends_with(b"\r\n") {
        if line.len() == MAX_LINE || !line.starts_with(b"PROXY ") {
            return Err(malformed());
        }
        line.push(stream.read_u8().await?);
    }
    text(&line).ok_or_else(malformed)
}

fn malformed() -> Error {
    Error::new(ErrorKind::InvalidData, "no header of the PROXY protocol")
}

/// A line of version 1, if it is one.
fn text(line: &[u8]) -> Option<Told> {
    let line = std::str::from_utf8(line).ok()?.strip_suffix("\r\n")?.strip_prefix("PROXY ")?;
    if line == "UNKNOWN" || line.starts_with("UNKNOWN ") {
        return Some(Told::Nobody);
    }
    let mut words = line.split(' ');
    let family = words.next()?;
    let mut address = || {
        let address: IpAddr = words.next()?.parse().ok()?;
        (address.is_ipv4() == (family == "TCP4")).then_some(address)
    };
    let (source, _) = (address()?, address()?);
    let mut port = || words.next()?.parse::<u16>().ok();
    let (port, _) = (port()?, port()?);
    (matches!(family, "TCP4" | "TCP6") && words.next().is_none()).then(|| Told::Client((source, port).into()))
}

/// The header of version 2, if it is one.
fn binary(command: u8, family: u8, block: &[u8]) -> Option<Told> {
    match (command, family) {
        (0x21, 0x11) => {
            let (source, rest) = block.split_first_chunk::<4>()?;
            let port = rest.get(4..8)?.first_chunk::<2>()?;
            Some(Told::Client((Ipv4Addr::from(*source), u16::from_be_bytes(*port)).into()))
        }
        (0x21, 0x21) => {
            let (source, rest) = block.split_first_chunk::<16>()?;
            let port = rest.get(16..20)?.first_chunk::<2>()?;
            Some(Told::Client((Ipv6Addr::from(*source), u16::from_be_bytes(*port)).into()))
        }
        // Its own health check, or a client of another kind than TCP.
        (0x20 | 0x21, _) => Some(Told::Nobody),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{SIGNATURE, Told, read};

    async fn of(bytes: &[u8]) -> Option<(Option<String>, usize)> {
        let mut rest = bytes;
        let read = read(&mut rest).await.ok()?;
        let client = match read {
            Told::Client(address) => Some(address.to_string()),
            Told::Nobody => None,
        };
        Some((client, rest.len()))
    }

    fn v2(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
        let length = u16::try_from(block.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[command, family], &length, block, b"GET"].concat()
    }

    #[tokio::test]
    async fn lines_of_version_1() {
        let cases: &[(&str, Option<&str>)] = &[
            ("PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n", Some("192.0.2.1:56324")),
            ("PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n", Some("[2001:db8::1]:1")),
            ("PROXY UNKNOWN\r\n", None),
            ("PROXY UNKNOWN ff ff 1 2\r\n", None),
        ];
        for (line, want) in cases {
            let got = of(format!("{line}GET").as_bytes()).await;
            assert_eq!(got, Some((want.map(str::to_owned), 3)), "{line}");
        }
        let long = format!("PROXY UNKNOWN {}\r\n", "x".repeat(100));
        for line in [
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "PROXY TCP4 192.0.2.1 198.51.100.1 56324\r\n",
            "PROXY TCP4 192.0.2.1 198.51.100.1 56324 70000\r\n",
            "PROXY TCP4 2001:db8::1 2001:db8::2 1 2\r\n",
            "PROXY TCP6 192.0.2.1 198.51.100.1 1 2\r\n",
            "PROXY TCP4 192.0.2.1 198.51.100.1 1 2 3\r\n",
            "PROXY UDP4 192.0.2.1 198.51.100.1 1 2\r\n",
            "PROXY TCP4  192.0.2.1 198.51.100.1 1 2\r\n",
            "PROXY ",
            &long,
        ] {
            assert_eq!(of(line.as_bytes()).await, None, "{line}");
        }
    }

    #[tokio::test]
    async fn headers_of_version_2() {
        let four = [192, 0, 2, 1, 198, 51, 100, 1, 0xdc, 4, 1, 187, 9, 9, 9];
        assert_eq!(of(&v2(0x21, 0x11, &four)).await, Some((Some("192.0.2.1:56324".to_owned()), 3)));
        let mut six = [0; 36];
        (six[0], six[15], six[33]) = (0x20, 1, 7);
        assert_eq!(of(&v2(0x21, 0x21, &six)).await, Some((Some("[2000::1]:7".to_owned()), 3)));
        assert_eq!(of(&v2(0x20, 0, &[])).await, Some((None, 3)));
        assert_eq!(of(&v2(0x21, 0x31, &[0; 216])).await, Some((None, 3)));
        assert_eq!(of(&v2(0x21, 0x11, &four[..11])).await, None);
        assert_eq!(of(&v2(0x11, 0x11, &four)).await, None);
        assert_eq!(of(&v2(0x22, 0x11, &four)).await, None);
        assert_eq!(of(&v2(0x21, 0x11, &[0; 2049])).await, None);
    }
}
