//! `admin cell`.

use super::{
    failure::Failure,
    input,
    plane::Plane,
    report::{Report, members},
};
use crate::domain::secret::Secret;
use clap::{Args, Subcommand, builder::PossibleValuesParser};
use http::{HeaderValue, Uri};
use serde_json::{Value, json};
use sqlx::query_as;
use std::path::PathBuf;
use uuid::Uuid;

#[derive(Subcommand, Debug)]
pub(super) enum CellCommand {
    /// Make a cell known
    Add(Add),
    /// List the cells
    List,
}

#[derive(Args, Debug)]
pub(super) struct Add {
    /// What the cell is called
    slug: String,
    /// Where it stands
    #[arg(long)]
    region: String,
    /// Where proxies reach it: http://host:port
    #[arg(long, value_name = "URL")]
    base_url: String,
    /// Whom it is for
    #[arg(long, value_parser = PossibleValuesParser::new(["shared", "dedicated"]))]
    class: String,
    /// File with the secret that proxies present to it (a line end at its end is not part of it)
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

impl CellCommand {
    pub(super) async fn run(self, plane: &mut Plane) -> Result<Report, Failure> {
        match self {
            Self::Add(arguments) => add(arguments, plane).await,
            Self::List => {
                let mut cells: Value = plane.document(query_as(include_str!("sql/list_cells.sql"))).await?;
                for cell in cells.as_array_mut().into_iter().flatten() {
                    let shown = cell["base_url"].as_str().map(without_credentials);
                    cell["base_url"] = json!(shown);
                }
                let columns = ["slug", "cell_id", "region", "class", "status", "base_url", "clusters"];
                let text = members(&columns, &cells);
                Ok(Report::new(json!({"cells": cells}), text))
            }
        }
    }
}

async fn add(arguments: Add, plane: &mut Plane) -> Result<Report, Failure> {
    let base_url = arguments.base_url.trim();
    if !is_usable(base_url) {
        return Err(Failure::usage(
            "--base-url: must be http://host:port, without credentials, query and fragment",
        ));
    }
    let secret = match &arguments.secret_file {
        None => None,
        Some(path) => Some(input::secret_file("the secret file", path)?),
    };
    if secret.as_ref().is_some_and(|secret| HeaderValue::from_str(secret.expose()).is_err()) {
        return Err(Failure::usage(
            "the cell's secret must be fit for a header: one line, no control characters",
        ));
    }
    let insert = query_as(include_str!("sql/add_cell.sql"))
        .bind(arguments.slug.trim())
        .bind(arguments.region.trim())
        .bind(base_url)
        .bind(&arguments.class)
        .bind(secret.as_ref().map(Secret::expose));
    let id: Uuid = plane.value(insert).await?;
    let text = format!("cell {} ({id}) at {base_url}", arguments.slug.trim());
    let document = json!({
        "cell_id": id, "slug": arguments.slug.trim(), "region": arguments.region.trim(),
        "base_url": base_url, "class": arguments.class, "has_secret": secret.is_some(),
    });
    Ok(Report::new(document, text))
}

/// What a proxy can forward to, see `control::snapshot`; a URL that it cannot use would be found out
/// by the first tenant.
fn is_usable(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else {
        return false;
    };
    let host = uri.authority().filter(|authority| !authority.as_str().contains('@'));
    uri.scheme_str() == Some("http")
        && host.is_some_and(|authority| !authority.host().is_empty())
        && uri.query().is_none()
        && !url.contains('#')
}

/// Rows that were put in by hand may hold more than we accept.
pub(super) fn without_credentials(url: &str) -> String {
    let start = url.find("://").map_or(0, |at| at + 3);
    let end = url[start..].find(['/', '?', '#']).map_or(url.len(), |at| start + at);
    match url[start..end].rfind('@') {
        Some(at) => format!("{}***{}", &url[..start], &url[start + at..]),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_usable, without_credentials};

    #[test]
    fn urls_of_cells() {
        for yes in ["http://10.0.3.11:6632", "http://cell", "http://[::1]:6632/", "http://cell/a"] {
            assert!(is_usable(yes), "{yes}");
        }
        for no in [
            "",
            "https://cell",
            "cell:6632",
            "cell",
            "/cell",
            "http://",
            "http://u:p@cell",
            "http://cell?x=1",
            "http://cell#x",
            "http://ce ll",
        ] {
            assert!(!is_usable(no), "{no}");
        }
    }

    #[test]
    fn credentials_are_not_shown() {
        let cases = [
            ("http://cell:1/a@b", "http://cell:1/a@b"),
            ("http://u:p@cell:1/a", "http://***@cell:1/a"),
            ("http://u:p@q@cell", "http://***@cell"),
            ("u:p@cell", "***@cell"),
            ("", ""),
        ];
        for (url, shown) in cases {
            assert_eq!(without_credentials(url), shown);
        }
    }
}
