//! A real headless Chromium, driven through ChromeDriver.
//!
//! `cargo xtask setup` installs both and downloads axe-core. Guarantees: the browser has a profile of its own and ends
//! with this value; everything the page logged, and every request that left the page's server, can be asked for, so that a
//! test can fail on it.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::npm_files::NpmFile;
use crate::ports::Port;
use crate::process::{Launch, Process, ProcessOutput};
use crate::temp_server_dir::TempServerDir;
use crate::wait::wait_until;
use crate::web_driver::WebDriver;

/// How long the driver may take to start, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How long a page may take to load.
const PAGE_LIMIT: Duration = Duration::from_secs(60);
/// How long a script may take: axe-core looks at every element of a page, beside the other tests.
const SCRIPT_LIMIT: Duration = Duration::from_secs(120);

/// Rules of accessibility that are checked: WCAG 2.2, level AA.
const AXE_TAGS: [&str; 6] =
    ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];

/// Those of them that depend on colors.
const AXE_COLOR_RULES: [&str; 2] = ["color-contrast", "link-in-text-block"];

/// Whether pages may run scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrowserScripts {
    /// As usual.
    On,
    /// Scripts are blocked, as by a cautious reader.
    Off,
}

/// A running browser with one window.
pub struct Browser {
    driver: WebDriver,
    // Killed when dropped, with the browser it started.
    _process: Process,
}

impl Browser {
    /// Starts a browser.
    pub async fn start(scripts: BrowserScripts) -> Result<Browser> {
        let port = Port::for_server()?;
        let server_dir = Arc::new(TempServerDir::private()?);
        let directory = server_dir.new_directory("chromedriver")?;
        let launch = Launch {
            program: find_program("chromedriver")?,
            arguments: vec![format!("--port={}", port.address().port()).into()],
            environment: vec![("HOME".to_owned(), directory.display().to_string())],
            user: None,
            output: ProcessOutput::Log,
        };
        let process = Process::spawn(&server_dir, &directory, launch)?;
        wait_until("ChromeDriver to listen", START_LIMIT, || {
            std::net::TcpStream::connect(port.address()).is_ok()
        })?;
        let profile = format!("--user-data-dir={}", directory.join("profile").display());
        let switches = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--hide-scrollbars",
            "--window-size=1280,900",
            &profile,
        ];
        let preferences = match scripts {
            BrowserScripts::On => json!({}),
            BrowserScripts::Off => {
                json!({"profile.default_content_setting_values.javascript": 2})
            }
        };
        let options = json!({
            "binary": find_program("chromium")?,
            "args": switches,
            "prefs": preferences,
        });
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"pageLoad": PAGE_LIMIT.as_millis(), "script": SCRIPT_LIMIT.as_millis()},
        });
        let driver = WebDriver::open(port.address(), capabilities).await;
        let driver = driver.context("failed to open the browser")?;
        Ok(Browser { driver, _process: process })
    }

    /// The window.
    pub fn driver(&self) -> &WebDriver {
        &self.driver
    }

    /// Everything that went wrong since the last call: errors on the console, violations of the content security policy,
    /// and requests to other servers than `origin`.
    pub async fn problems(&self, origin: &str) -> Result<Vec<String>> {
        let is_problem = |entry: &(String, String)| {
            entry.0 == "SEVERE" || entry.1.contains("Content Security Policy")
        };
        let logged = self.log("browser").await?.into_iter().filter(is_problem);
        let mut problems: Vec<String> = logged.map(|(_, message)| message).collect();
        for (_, message) in self.log("performance").await? {
            let event: Value = serde_json::from_str(&message).unwrap_or_default();
            let message = &event["message"];
            if message["method"] != "Network.requestWillBeSent" {
                continue;
            }
            let address = message["params"]["request"]["url"].as_str().unwrap_or_default();
            let is_local = ["data:", "chrome:", "about:", "blob:", "chrome-extension:"]
                .iter()
                .any(|scheme| address.starts_with(scheme));
            if !is_local && !address.starts_with(origin) {
                problems.push(format!("request to another server: {address}"));
            }
        }
        Ok(problems)
    }

    /// What was logged since the last call: levels and messages.
    async fn log(&self, kind: &str) -> Result<Vec<(String, String)>> {
        let entries = self.driver.post("se/log", json!({"type": kind})).await?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let entries = entries.as_array().context("a log")?.iter();
        Ok(entries.map(|entry| (text(&entry["level"]), text(&entry["message"]))).collect())
    }

    /// Violations of WCAG 2.2 AA, and of what axe-core calls best practice, on this page. Needs scripts.
    pub async fn accessibility_violations(&self) -> Result<Vec<String>> {
        self.run_axe(json!({"type": "tag", "values": AXE_TAGS})).await
    }

    /// Those of the rules that depend on colors: a page that is checked in one color scheme needs only these in the other.
    pub async fn contrast_violations(&self) -> Result<Vec<String>> {
        self.run_axe(json!({"type": "rule", "values": AXE_COLOR_RULES})).await
    }

    async fn run_axe(&self, run_only: Value) -> Result<Vec<String>> {
        if self.driver.execute("return typeof axe === 'object'").await? == false {
            let source = NpmFile::AxeCore.read()?;
            // As a global name: the code of `execute` is a function of its own.
            let source = format!("{source}; window.axe = axe;");
            self.driver.execute(&source).await?;
        }
        let script = "const done = arguments[1]; axe.run(document, {runOnly: arguments[0], resultTypes: ['violations']})
            .then(found => done(found.violations.flatMap(rule => rule.nodes.map(node =>
                `${rule.id}: ${node.target.join(' ')}: ${node.failureSummary}`))), error => done([String(error)]));";
        let found = self.driver.execute_async(script, run_only).await?;
        Ok(serde_json::from_value(found)?)
    }

    /// Sets the size of the page, also below what a window allows.
    pub async fn resize(&self, width: u32, height: u32) -> Result<()> {
        let metrics =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.driver.send_to_chromium("Emulation.setDeviceMetricsOverride", metrics).await
    }

    /// Makes the processor of pages slower by this factor; 1 is its own speed.
    pub async fn throttle_processor(&self, factor: u32) -> Result<()> {
        self.driver
            .send_to_chromium("Emulation.setCPUThrottlingRate", json!({"rate": factor}))
            .await
    }

    /// Makes pages light or dark.
    pub async fn set_color_scheme(&self, scheme: &str) -> Result<()> {
        let media = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.driver.send_to_chromium("Emulation.setEmulatedMedia", media).await
    }

    /// Ends the browser.
    pub async fn quit(self) -> Result<()> {
        let Browser { driver, _process } = self;
        driver.quit().await?;
        _process.kill9()
    }
}

fn find_program(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    match env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file()) {
        Some(file) => Ok(file),
        None => bail!("`{name}` is missing: run `cargo xtask setup`"),
    }
}
