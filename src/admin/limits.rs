//! `admin limits`: the limits of a cluster, and what stands against them in running proxies.

use super::{
    failure::Failure,
    plane::{Plane, Reference},
    report::{Report, table, word},
    show,
};
use clap::Args;
use serde_json::{Map, Value, json};
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// How long a proxy may take to answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 64 * 1024;

#[derive(Args, Debug)]
pub(super) struct LimitsCommand {
    /// Slug or id
    cluster: Reference,
    /// Admin listener of a running proxy; give it once for each proxy (default: the configured one)
    #[arg(long = "proxy", value_name = "ADDRESS")]
    proxies: Vec<SocketAddr>,
}

impl LimitsCommand {
    /// `configured` is the admin listener of the configuration.
    pub(super) async fn run(
        mut self,
        plane: &mut Plane,
        configured: Option<SocketAddr>,
    ) -> Result<Report, Failure> {
        let row = show::row(&self.cluster, plane).await?;
        if self.proxies.is_empty() {
            self.proxies.extend(configured);
        }
        let limits = show::effective(&row.limits, &row.overrides);
        let mut live = Vec::new();
        for proxy in self.proxies {
            live.push((proxy.to_string(), ask(proxy, row.id.to_string()).await));
        }
        let mut text = format!("cluster   {} ({})\nplan      {}\n\n", row.slug, row.id, row.plan);
        text.push_str(&show::limits_table(&limits));
        for (proxy, answer) in &live {
            text.extend(["\n\nproxy ", proxy, "\n", &lines(answer)]);
        }
        let live: Vec<Value> = live
            .into_iter()
            .map(|(proxy, answer)| match answer {
                Ok(live) => json!({ "proxy": proxy, "live": live }),
                Err(error) => json!({ "proxy": proxy, "error": error }),
            })
            .collect();
        let document = json!({
            "cluster_id": row.id,
            "cluster_slug": row.slug,
            "plan": row.plan,
            "limits": show::limits_document(&limits),
            "proxies": live,
        });
        Ok(Report::new(document, text))
    }
}

/// What stands against the limits in one proxy; null when it has served nothing of the cluster lately.
async fn ask(proxy: SocketAddr, cluster: String) -> Result<Value, String> {
    let asking = async {
        let mut stream = TcpStream::connect(proxy).await?;
        let request = format!("GET /limits/{cluster} HTTP/1.0\r\nHost: {proxy}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.take(MAX_ANSWER).read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = match timeout(PATIENCE, asking).await {
        Ok(answer) => answer.map_err(|error| error.kind().to_string())?,
        Err(_) => return Err("no answer in time".to_owned()),
    };
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("not an answer of a proxy")?;
    let mut document: Map<String, Value> =
        serde_json::from_str(body).map_err(|_| "not an answer of a proxy".to_owned())?;
    if head.split(' ').nth(1) != Some("200") {
        return Err(document.get("error").map_or_else(|| "refused".to_owned(), word));
    }
    Ok(document.remove("live").unwrap_or_default())
}

fn lines(answer: &Result<Value, String>) -> String {
    let live = match answer {
        Ok(Value::Object(live)) => live,
        Ok(_) => return "has served nothing of this cluster lately".to_owned(),
        Err(error) => return error.clone(),
    };
    let rows: Vec<Vec<String>> = live
        .iter()
        .map(|(name, value)| {
            let value = match (value.get("left"), value.get("burst")) {
                (Some(left), Some(burst)) => format!("{left} of {burst} left"),
                _ => word(value),
            };
            vec![name.clone(), value]
        })
        .collect();
    table(&["use", "now"], &rows)
}
