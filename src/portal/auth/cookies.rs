//! Setting and clearing the session cookies (proxy contract §6).

use http::HeaderValue;

/// What the cookies are called and where they are sent.
#[derive(Clone, Debug)]
pub struct SessionCookies {
    /// Name of the session cookie; the cell's own is called after it.
    pub name: String,
    /// The domain whose hosts all get it; none: only the host that set it.
    pub domain: Option<String>,
    /// Whether people always come by https, whatever the last hop was.
    pub secure: bool,
}

impl SessionCookies {
    /// Whether cookies are for https alone, when the client came by https or not.
    pub fn is_secure(&self, https: bool) -> bool {
        self.secure || self.domain.is_some() || https
    }

    /// The cookie of a login, good for `max_age` seconds.
    pub fn session(&self, token: &str, max_age: u64, https: bool) -> Option<HeaderValue> {
        let domain = self.domain.as_deref();
        cookie(&self.name, token, max_age, domain, self.is_secure(https))
    }

    /// The cookie of a session that was handed over to this cell alone.
    pub fn of_cell(&self, token: &str, max_age: u64, https: bool) -> Option<HeaderValue> {
        let secure = self.is_secure(https);
        cookie(&self.cell_name(secure), token, max_age, None, secure)
    }

    /// What makes a browser forget both.
    pub fn clearing(&self, https: bool) -> Vec<HeaderValue> {
        let secure = self.is_secure(https);
        let domain = self.domain.as_deref();
        let session = cookie(&self.name, "", 0, domain, secure);
        session.into_iter().chain(self.clearing_cell(https)).collect()
    }

    /// What makes a browser forget the cell's own, which would come before the other.
    pub fn clearing_cell(&self, https: bool) -> Option<HeaderValue> {
        let secure = self.is_secure(https);
        cookie(&self.cell_name(secure), "", 0, None, secure)
    }

    fn cell_name(&self, secure: bool) -> String {
        // Browsers take a `__Host-` cookie only with Secure, and never with Domain.
        format!("{}{}_cell", if secure { "__Host-" } else { "" }, self.name)
    }
}

fn cookie(name: &str, value: &str, max_age: u64, domain: Option<&str>, secure: bool) -> Option<HeaderValue> {
    let domain = domain.map(|domain| format!("; Domain={domain}")).unwrap_or_default();
    let secure = if secure { "; Secure" } else { "" };
    let text = format!("{name}={value}; Path=/; HttpOnly; SameSite=Lax; Max-Age={max_age}{domain}{secure}");
    let mut header = HeaderValue::try_from(text).ok()?;
    header.set_sensitive(true);
    Some(header)
}

#[cfg(test)]
mod tests {
    use super::SessionCookies;

    const FLAGS: &str = "Path=/; HttpOnly; SameSite=Lax";

    #[test]
    fn cookies() {
        let plain = SessionCookies { name: "q".to_owned(), domain: None, secure: false };
        let behind_tls = SessionCookies { secure: true, ..plain.clone() };
        let domain = SessionCookies { domain: Some("q.example".to_owned()), ..plain.clone() };
        for (cookies, https, session, of_cell) in [
            (&plain, false, "", "q_cell"),
            (&plain, true, "; Secure", "__Host-q_cell"),
            (&behind_tls, false, "; Secure", "__Host-q_cell"),
            (&domain, false, "; Domain=q.example; Secure", "__Host-q_cell"),
        ] {
            let secure = if of_cell.starts_with("__Host-") { "; Secure" } else { "" };
            assert_eq!(
                cookies.session("t", 60, https).unwrap(),
                format!("q=t; {FLAGS}; Max-Age=60{session}")
            );
            assert_eq!(
                cookies.of_cell("t", 60, https).unwrap(),
                format!("{of_cell}=t; {FLAGS}; Max-Age=60{secure}")
            );
            let cleared = cookies.clearing(https);
            assert_eq!(cleared[0], format!("q=; {FLAGS}; Max-Age=0{session}"));
            assert_eq!(cleared[1], format!("{of_cell}=; {FLAGS}; Max-Age=0{secure}"));
        }
        assert!(plain.session("a\nb", 1, false).is_none());
    }
}
