//! The sign-in page: one form, no script, nothing from elsewhere.

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::HeaderValue;
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("login.html");
const STYLE: &str = include_str!("login.css");

/// Where people sign in when this host only verifies.
#[derive(Clone, Debug)]
pub struct PortalLink {
    /// An http:// or https:// URL.
    pub url: String,
    /// What the link says.
    pub label: String,
}

/// The pages, and the policy under which browsers show them.
pub(super) struct Pages {
    notice: Option<PortalLink>,
    can_sign_in: bool,
    policy: HeaderValue,
}

impl Pages {
    /// `can_sign_in` is false where this host only verifies: then there is a notice, with `link` if given.
    pub fn new(can_sign_in: bool, link: Option<PortalLink>) -> Self {
        let style = STANDARD.encode(Sha256::digest(STYLE));
        let policy = format!(
            "default-src 'none'; style-src 'sha256-{style}'; form-action 'self'; base-uri 'none'; \
             frame-ancestors 'none'"
        );
        // Base64 and our own words are header text.
        let policy = HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"));
        Self { notice: link, can_sign_in, policy }
    }

    /// `Content-Security-Policy`.
    pub fn policy(&self) -> HeaderValue {
        self.policy.clone()
    }

    /// The page; after a sign-in it leads to `next`, which must be a safe one.
    pub fn login(&self, next: &str, failed: bool) -> Bytes {
        let content = if self.can_sign_in { form(next, failed) } else { self.verify_only() };
        Bytes::from(PAGE.replace("{style}", STYLE).replace("{content}", &content))
    }

    fn verify_only(&self) -> String {
        let mut text = "<p>This host checks sessions and makes none.</p>".to_owned();
        if let Some(link) = &self.notice {
            let (url, label) = (escaped(&link.url), escaped(&link.label));
            text.extend(["<p><a href=\"", &url, "\">", &label, "</a></p>"]);
        }
        text
    }
}

fn form(next: &str, failed: bool) -> String {
    let alert = if failed { r#"<p role="alert">Invalid email or password.</p>"# } else { "" };
    format!(
        r#"{alert}
<form method="post" action="/auth/login">
<input type="hidden" name="next" value="{}">
<label>Email<input type="email" name="email" autocomplete="username" required autofocus></label>
<label>Password<input type="password" name="password" autocomplete="current-password" required></label>
<button>Sign in</button>
</form>"#,
        escaped(next)
    )
}

/// Text as it may stand in an element or a quoted attribute.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// Where to go after a sign-in: `next` when it is a place on this host, else the root. Browsers read `\` as
/// `/` and skip control characters.
pub(super) fn safe_next(next: Option<&str>) -> &str {
    const LONGEST: usize = 2_048;
    next.filter(|next| {
        let mut bytes = next.bytes();
        next.len() <= LONGEST
            && bytes.next() == Some(b'/')
            && !matches!(bytes.next(), Some(b'/' | b'\\'))
            && !next.contains("://")
            && next.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ')
    })
    .unwrap_or("/")
}

#[cfg(test)]
mod tests {
    use super::{Pages, PortalLink, safe_next};

    #[test]
    fn only_places_on_this_host_come_next() {
        for (next, want) in [
            (Some("/console"), "/console"),
            (Some("/a?b=c&d=/e#f"), "/a?b=c&d=/e#f"),
            (Some("/"), "/"),
            (Some(""), "/"),
            (None, "/"),
            (Some("console"), "/"),
            (Some("//evil.example"), "/"),
            (Some("/\\evil.example"), "/"),
            (Some("https://evil.example"), "/"),
            (Some("/x?u=https://evil.example"), "/"),
            (Some("/\t/evil.example"), "/"),
            (Some("/a\r\nSet-Cookie: x=y"), "/"),
            (Some("/\u{430}"), "/"),
        ] {
            assert_eq!(safe_next(next), want, "{next:?}");
        }
        assert_eq!(safe_next(Some(&format!("/{}", "a".repeat(2_048)))), "/");
    }

    #[test]
    fn nothing_in_a_page_is_taken_for_markup() {
        let text =
            |pages: &Pages, next, failed| String::from_utf8(pages.login(next, failed).to_vec()).unwrap();
        let pages = Pages::new(true, None);
        let page = text(&pages, r#"/"><script>'&"#, true);
        assert!(page.contains(r#"value="/&quot;&gt;&lt;script&gt;&#39;&amp;""#), "{page}");
        assert!(page.contains("Invalid email or password."));
        assert!(!text(&pages, "/", false).contains("Invalid"));
        let link = PortalLink { url: "https://a.example/?x=\"".to_owned(), label: "<b>".to_owned() };
        let page = text(&Pages::new(false, Some(link)), "/", false);
        assert!(page.contains(r#"<a href="https://a.example/?x=&quot;">&lt;b&gt;</a>"#), "{page}");
        assert!(!page.contains("<form"));
        assert!(!text(&Pages::new(false, None), "/", false).contains("<a "));
    }

    #[test]
    fn the_policy_names_the_style() {
        let pages = Pages::new(true, None);
        assert!(pages.policy().to_str().unwrap().contains("style-src 'sha256-"));
    }
}
