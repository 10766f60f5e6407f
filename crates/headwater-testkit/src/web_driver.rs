//! A client of the WebDriver protocol (W3C), as far as the tests need it: JSON over HTTP to ChromeDriver.
//!
//! The crate `thirtyfour` does the same and enables `serde_json/preserve_order`, so that all tests of the workspace would
//! run with other maps than the product.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Key of the id of an element, given by the protocol.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// How long the driver may take for a call, loading a page included.
const CALL_LIMIT: Duration = Duration::from_secs(90);

/// A session: one browser window.
#[derive(Clone, Debug)]
pub struct WebDriver {
    address: SocketAddr,
    session: String,
}

/// An element of the page.
#[derive(Debug)]
pub struct WebElement {
    driver: WebDriver,
    id: String,
}

impl WebDriver {
    pub(crate) async fn open(address: SocketAddr, capabilities: Value) -> Result<Self> {
        let wanted = json!({"capabilities": {"alwaysMatch": capabilities}});
        let opened = call(address, "POST", "/session", Some(wanted)).await?;
        let session = opened["sessionId"].as_str().context("a session id")?.to_owned();
        Ok(Self { address, session })
    }

    async fn get(&self, path: &str) -> Result<Value> {
        call(self.address, "GET", &format!("/session/{}/{path}", self.session), None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Result<Value> {
        call(self.address, "POST", &format!("/session/{}/{path}", self.session), Some(body)).await
    }

    async fn get_text(&self, path: &str) -> Result<String> {
        Ok(self.get(path).await?.as_str().context("a text")?.to_owned())
    }

    /// Opens a page and waits until it is loaded.
    pub async fn goto(&self, url: &str) -> Result<()> {
        self.post("url", json!({"url": url})).await.map(drop)
    }

    /// The address of the page.
    pub async fn current_url(&self) -> Result<String> {
        self.get_text("url").await
    }

    /// The HTML of the page, as it is now.
    pub async fn source(&self) -> Result<String> {
        self.get_text("source").await
    }

    /// The first element that this CSS selector matches.
    pub async fn find(&self, css: &str) -> Result<WebElement> {
        self.find_by("css selector", css).await
    }

    /// The first element that this XPath expression matches.
    pub async fn find_xpath(&self, xpath: &str) -> Result<WebElement> {
        self.find_by("xpath", xpath).await
    }

    async fn find_by(&self, using: &str, value: &str) -> Result<WebElement> {
        let found = self.post("element", json!({"using": using, "value": value})).await?;
        let id = found[ELEMENT].as_str().context("an element")?.to_owned();
        Ok(WebElement { driver: self.clone(), id })
    }

    /// All elements that this CSS selector matches.
    pub async fn find_all(&self, css: &str) -> Result<Vec<WebElement>> {
        let found = self.post("elements", json!({"using": "css selector", "value": css})).await?;
        let elements = found.as_array().context("elements")?.iter().map(|element| {
            let id = element[ELEMENT].as_str().context("an element")?.to_owned();
            Ok(WebElement { driver: self.clone(), id })
        });
        elements.collect()
    }

    /// How many elements this CSS selector matches.
    pub async fn count(&self, css: &str) -> Result<usize> {
        Ok(self.find_all(css).await?.len())
    }

    /// Runs the body of a function in the page and returns what it returns.
    pub async fn execute(&self, script: &str) -> Result<Value> {
        self.post("execute/sync", json!({"script": script, "args": []})).await
    }

    /// Runs the body of a function in the page, which passes its result to its last argument.
    pub(crate) async fn execute_async(&self, script: &str, argument: Value) -> Result<Value> {
        self.post("execute/async", json!({"script": script, "args": [argument]})).await
    }

    /// A picture of the page: base64 of a PNG file.
    pub async fn screenshot(&self) -> Result<String> {
        self.get_text("screenshot").await
    }

    /// Presses keys one after the other, wherever the focus is. Special keys have characters of their own, such as `\u{e004}` for Tab.
    pub async fn press(&self, keys: &str) -> Result<()> {
        let press = |key: char| {
            let key = key.to_string();
            [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})]
        };
        let presses: Vec<Value> = keys.chars().flat_map(press).collect();
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": presses});
        self.post("actions", json!({"actions": [keyboard]})).await.map(drop)
    }

    /// Opens another tab and returns its handle; the window stays on its own.
    pub async fn new_tab(&self) -> Result<String> {
        let opened = self.post("window/new", json!({"type": "tab"})).await?;
        Ok(opened["handle"].as_str().context("a handle")?.to_owned())
    }

    /// Goes on in this tab.
    pub async fn switch_to(&self, handle: &str) -> Result<()> {
        self.post("window", json!({"handle": handle})).await.map(drop)
    }

    /// Sends a command of the Chrome DevTools protocol.
    pub(crate) async fn send_to_chromium(&self, command: &str, parameters: Value) -> Result<()> {
        self.post("goog/cdp/execute", json!({"cmd": command, "params": parameters})).await.map(drop)
    }

    pub(crate) async fn quit(self) -> Result<()> {
        call(self.address, "DELETE", &format!("/session/{}", self.session), None).await.map(drop)
    }
}

impl WebElement {
    fn path(&self, rest: &str) -> String {
        format!("element/{}/{rest}", self.id)
    }

    /// Its text as a reader sees it.
    pub async fn text(&self) -> Result<String> {
        self.driver.get_text(&self.path("text")).await
    }

    /// Its attribute, if it has it.
    pub async fn attribute(&self, name: &str) -> Result<Option<String>> {
        let value = self.driver.get(&self.path(&format!("attribute/{name}"))).await?;
        Ok(value.as_str().map(str::to_owned))
    }

    /// What a reader has typed into it.
    pub async fn value(&self) -> Result<String> {
        self.driver.get_text(&self.path("property/value")).await
    }

    /// Clicks it.
    pub async fn click(&self) -> Result<()> {
        self.driver.post(&self.path("click"), json!({})).await.map(drop)
    }

    /// Removes its text.
    pub async fn clear(&self) -> Result<()> {
        self.driver.post(&self.path("clear"), json!({})).await.map(drop)
    }

    /// Types a text into it.
    pub async fn send_keys(&self, text: &str) -> Result<()> {
        self.driver.post(&self.path("value"), json!({"text": text})).await.map(drop)
    }
}

/// Sends a request and returns the `value` of its answer. Each has a connection of its own.
async fn call(address: SocketAddr, method: &str, path: &str, body: Option<Value>) -> Result<Value> {
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = timeout(CALL_LIMIT, exchange(address, request.as_bytes())).await;
    let answer = answer.with_context(|| format!("{method} {path} was not answered"))??;
    let mut answer: Value = serde_json::from_slice(&answer)
        .with_context(|| format!("{method} {path}: {}", String::from_utf8_lossy(&answer)))?;
    let value = answer["value"].take();
    if let (Some(error), Some(message)) = (value["error"].as_str(), value["message"].as_str()) {
        bail!("{method} {path}: {error}: {message}");
    }
    Ok(value)
}

/// Returns the body of the answer.
async fn exchange(address: SocketAddr, request: &[u8]) -> Result<Vec<u8>> {
    let mut socket = TcpStream::connect(address).await?;
    socket.write_all(request).await?;
    let mut answer = Vec::new();
    let body = loop {
        ensure!(socket.read_buf(&mut answer).await? > 0, "the connection ended");
        if let Some(head) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break head + 4;
        }
    };
    let head = String::from_utf8_lossy(&answer[..body]).to_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let end = body + length.context("no content-length")?.trim().parse::<usize>()?;
    while answer.len() < end {
        ensure!(socket.read_buf(&mut answer).await? > 0, "the connection ended");
    }
    Ok(answer[body..end].to_vec())
}
