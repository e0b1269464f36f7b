//! A real browser by `WebDriver`: Debian's packages chromium and chromium-driver. Not having them fails.

use crate::support::{Socket, eventually, free_port};
use serde_json::{Value, json};
use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tempfile::TempDir;

/// The least contrast ratio of any text on the page with what is behind it.
pub const CONTRAST: &str = r"
    const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.map((part) => {
            const share = part / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const [r, g, b, a] = parse(getComputedStyle(at).backgroundColor);
            if (a === undefined || a > 0) return [r, g, b];
        }
        return [255, 255, 255];
    };
    let least = 21;
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility()) continue;
        const [text, behind] = [light(parse(getComputedStyle(element).color).slice(0, 3)), light(ground(element))];
        least = Math.min(least, (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05));
    }
    return least;
";

/// See the module.
pub struct Browser {
    port: u16,
    session: String,
    driver: Child,
    profile: TempDir,
}

impl Browser {
    /// Starts the driver and a browser without a window.
    pub async fn start() -> Self {
        let port = free_port();
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver, from the packages chromium and chromium-driver, is on the PATH");
        let profile = TempDir::new().unwrap();
        let mut browser = Self { port, session: String::new(), driver, profile };
        eventually("chromedriver listens", Duration::from_secs(30), async || {
            tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()
        })
        .await;
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--disable-dev-shm-usage",
            &format!("--user-data-dir={}", browser.profile.path().display()),
        ];
        let wish = json!({"capabilities": {"alwaysMatch": {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }}});
        let made = browser.call("POST", "/session", &wish).await;
        made["sessionId"].as_str().unwrap_or_else(|| panic!("{made}")).clone_into(&mut browser.session);
        browser
    }

    async fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = Socket::open(self.port).await.ask(request).await;
        let answer: Value = answer.json();
        assert!(answer["value"].get("error").is_none(), "{path}: {answer}");
        answer["value"].clone()
    }

    async fn here(&self, path: &str, body: Value) -> Value {
        self.call("POST", &format!("/session/{}{path}", self.session), &body).await
    }

    async fn devtools(&self, command: &str, parameters: Value) {
        self.here("/goog/cdp/execute", json!({"cmd": command, "params": parameters})).await;
    }

    /// Opens an address in a window of this width.
    pub async fn show(&self, address: &str, width: u32, dark: bool) {
        let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600});
        self.devtools("Emulation.setDeviceMetricsOverride", metrics).await;
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.devtools("Emulation.setEmulatedMedia", media).await;
        self.here("/url", json!({"url": address})).await;
    }

    /// Runs the body of a function in the page.
    pub async fn run(&self, script: &str) -> Value {
        self.here("/execute/sync", json!({"script": script, "args": []})).await
    }

    /// Keeps a picture of the page under `target/`.
    pub async fn picture(&self, name: &str) {
        use base64::Engine;
        let path = format!("/session/{}/screenshot", self.session);
        let picture = self.call("GET", &path, &json!({})).await;
        let bytes = base64::engine::general_purpose::STANDARD.decode(picture.as_str().unwrap()).unwrap();
        let folder: PathBuf = [env!("CARGO_TARGET_TMPDIR"), "screenshots"].iter().collect();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), bytes).unwrap();
    }

    /// What the console holds.
    pub async fn complaints(&self) -> Vec<String> {
        let entries = self.here("/se/log", json!({"type": "browser"})).await;
        entries.as_array().unwrap().iter().map(Value::to_string).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.driver.kill();
        let _ = self.driver.wait();
        // The browser is not in the driver's group; its profile tells it from others.
        let profile = self.profile.path().to_string_lossy().into_owned();
        let _ = Command::new("pkill").args(["-KILL", "-f", &profile]).status();
    }
}
