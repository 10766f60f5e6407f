//! A server with data on every screen, and a browser that looks at it.

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use headwater_testkit::{
    Browser, BrowserScripts, Database, Postgres, Redis, WebDriver, WebElement,
};
use serde_json::{Value, json};

use crate::support::desk::{all_idle, open};
use crate::support::sender::SECRET;
use crate::support::{LIMIT, Server, ServerDir, is_whole_search_page};

/// A server on PostgreSQL and Redis.
pub(crate) struct ConsoleFixture {
    pub(crate) server: Server,
    pub(crate) redis: Redis,
    pub(crate) postgres: Postgres,
    pub(crate) database: Database,
    _dir: ServerDir,
}

/// What a server with data has.
pub(crate) struct ConsoleData {
    pub(crate) ticket: String,
    pub(crate) quarantined: i64,
    pub(crate) dead_reply: i64,
    pub(crate) message: String,
    pub(crate) letter: String,
    pub(crate) session: String,
    /// The first step of the session.
    pub(crate) step: String,
    /// The cause that three of the dead letters have.
    pub(crate) cause: String,
}

/// Work for people.
pub(crate) struct DeskData {
    /// A ticket that is handed over, to nobody.
    pub(crate) handed_over: String,
    /// Two drafts of the model that wait for a decision.
    pub(crate) drafts: [i64; 2],
}

impl ConsoleFixture {
    pub(crate) fn start() -> Result<Self> {
        Self::start_with("")
    }

    /// Starts a server with these further settings.
    pub(crate) fn start_with(further: &str) -> Result<Self> {
        let (redis, postgres) = (Redis::start()?, Postgres::start()?);
        let database = postgres.database()?;
        // The answer to a ticket with the word `approval` is a draft.
        let settings = format!(
            "[[integration]]\nid = \"code\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\n\
             [[integration]]\nid = \"desk\"\nprovider = \"desk\"\n\
             [[integration.rule]]\nmode = \"draft\"\nwords = [\"approval\"]\n{further}"
        );
        let dir = ServerDir::new()?.settings(&settings)?;
        let arguments = ["--stream-url", &redis.url(), "--database-url", &database.url()];
        let quick = ["--issue-quiet", "0s", "--issue-max-wait", "0s"];
        let server = dir.serve(&[&arguments[..], &quick].concat())?;
        Ok(Self { server, redis, postgres, database, _dir: dir })
    }

    /// Something on every screen: a ticket with an answer, a quarantined issue, a dead reply, topics with a group, messages
    /// and dead letters of two causes.
    pub(crate) async fn fill(&self) -> Result<ConsoleData> {
        let server = &self.server;
        let new =
            json!({"title": "Router blinks red", "content": "Since yesterday.", "user_id": "ann"});
        let (status, ticket) = server.post("/api/v1/tickets", &new).await?;
        ensure!(status == 201, "{ticket}");
        let id = ticket["ticket_id"].as_str().context("a ticket id")?.to_owned();
        // The scripted model answers.
        let path = format!("/api/v1/tickets/{id}");
        let is_answered =
            |_: u16, ticket: &Value| ticket["messages"].as_array().is_some_and(|all| all.len() > 1);
        server.until(&path, is_answered).await?;

        let stuck = "INSERT INTO integrations (name, provider) VALUES ('shop', 'github');
            INSERT INTO issues (integration_id, external_project_id, external_issue_id, quarantined_at, last_error)
            SELECT id, 'acme/shop', n::text, now(), 'payment ' || n || ' refused by the bank'
            FROM integrations, generate_series(1, 3) AS n WHERE name = 'shop';
            INSERT INTO outbox (issue_id, integration_id, kind, target, idempotency_key, payload, status, due_at, last_error)
            SELECT id, integration_id, 'reply', 'acme/shop#1', 'dead-' || id, '{\"body\":\"hello\"}', 'dead', now(), 'status 403'
            FROM issues WHERE external_issue_id = '1' AND external_project_id = 'acme/shop'";
        self.database.query(stuck)?;
        // Also of the next minutes, so that no minute is missing until this server has stored its own, however slow the test is.
        let minutes = "INSERT INTO metrics_history (minute, process, data)
            SELECT extract(epoch FROM now())::bigint / 60 - n, 'worker-<b>2</b>',
                '{\"n\": 6, \"events\": ' || abs(n) || ', \"runs\": ' || abs(n) || ', \"queued\": 3, \"outbox_lag_ms\": 1500, \"run\": [0, 0, 0, 2, 5, 1], \"started\": '
                || (extract(epoch FROM now())::bigint - 1200) * 1000 || ', \"version\": \"1.2.3\"}'
            FROM generate_series(-5, 30) AS n WHERE n <> 10";
        self.database.query(minutes)?;
        let (_, found) = server.get("/api/v1/issues?quarantined=true").await?;
        let quarantined = found["issues"][0]["id"].as_i64().context("a quarantined issue")?;

        let (_, dead) = server.get("/api/v1/outbox/dead").await?;
        let dead_reply = dead["rows"][0]["id"].as_i64().context("a dead reply")?;

        let topic = json!({"name": "orders", "partitions": 4});
        ensure!(server.post("/api/v1/topics", &topic).await?.0 == 201);
        let one = |n: u32| json!({"key": format!("customer-{n}"), "payload": format!("{{\"order\":{n},\"total\":12.5}}")});
        let messages = json!({"messages": (0..6).map(one).collect::<Vec<_>>()});
        let (_, sent) = server.post("/api/v1/topics/orders/messages", &messages).await?;
        let message = sent["messages"][5]["id"].as_str().context("an entry id")?.to_owned();
        let reasons = |n: usize| match n {
            0 => "connection refused by 10.0.0.7:443".to_owned(),
            n => format!("order {n} has no address"),
        };
        let mut dead = 0;
        while dead < 4 {
            let wanted = json!({"max": 1, "wait_ms": 5000, "lease_ms": 60000});
            let (status, pulled) =
                server.post("/api/v1/topics/orders/groups/billing/pull", &wanted).await?;
            ensure!(status == 200, "{pulled}");
            for message in pulled["messages"].as_array().context("messages")? {
                let settlement = json!({"lease": message["lease"], "outcome": "dead_letter", "reason": reasons(dead)});
                let body = json!({"settlements": [settlement]});
                let (status, settled) =
                    server.post("/api/v1/topics/orders/groups/billing/settle", &body).await?;
                ensure!(status == 200, "{settled}");
                dead += 1;
            }
        }
        let letters = |_: u16, page: &Value| {
            page["dead_letters"].as_array().is_some_and(|all| all.len() == 4)
        };
        let page = server.until("/api/v1/topics/orders/dead-letters", letters).await?;
        let letter = page["dead_letters"][0]["id"].as_str().context("a dead letter")?.to_owned();
        let failures = all_failures(server).await?;
        let mut clusters = failures["clusters"].as_array().context("clusters")?.iter();
        let cause = clusters.find(|one| one["cause"] == "order # has no address");
        let cause = cause.and_then(|one| one["id"].as_str()).context("a cause")?.to_owned();

        // A plan over dead letters that none of the tests touches: it is paused and sends nothing.
        self.paused_plan().await?;
        let (_, page) = server.get("/api/v1/sessions").await?;
        let session =
            page["sessions"][0]["session"].as_str().context("a session of the run")?.to_owned();
        let (_, page) = server.get(&format!("/api/v1/sessions/{session}/events")).await?;
        let step = page["events"][0]["id"].as_str().context("a step")?.to_owned();
        let stream = json!({"stream": "camera-1"});
        let (status, added) = server.post("/api/v1/assignments/cameras/streams", &stream).await?;
        ensure!(status < 300, "{added}");
        let (status, _) =
            server.post("/webhooks/github/code", &json!({"action": "opened"})).await?;
        ensure!(status == 401, "an unsigned webhook must be rejected");
        // The use of the model is stored beside its answer.
        let has_rows = |_: u16, report: &Value| report["rows"][0].is_array();
        server.until("/api/v1/reports/tokens-and-cost", has_rows).await?;
        Ok(ConsoleData {
            ticket: id,
            quarantined,
            dead_reply,
            message,
            letter,
            session,
            step,
            cause,
        })
    }

    /// Waits until the consumer over HTTP that [`fill`](Self::fill) has used has left its group.
    pub(crate) async fn until_left(&self) -> Result<()> {
        let has_left = |_: u16, group: &Value| group["members"] == json!([]);
        self.server.until("/api/v1/topics/orders/groups/billing", has_left).await.map(drop)
    }

    /// A ticket that is handed over, and two drafts.
    pub(crate) async fn fill_desk(&self) -> Result<DeskData> {
        let server = &self.server;
        let ticket = open(server, "I want to speak to a human").await?;
        let handed_over = ticket["ticket_id"].as_str().context("a ticket id")?.to_owned();
        for number in [1, 2] {
            open(server, &format!("Order {number} needs an approval.")).await?;
        }
        let is_handed_over = |_: u16, ticket: &Value| ticket["handed_over"] == true;
        server.until(&format!("/api/v1/tickets/{handed_over}"), is_handed_over).await?;
        let both =
            |_: u16, page: &Value| page["drafts"].as_array().is_some_and(|all| all.len() == 2);
        let page = server.until("/api/v1/drafts?status=pending", both).await?;
        all_idle(server).await?;
        let id = |index: usize| page["drafts"][index]["id"].as_i64().context("a draft");
        Ok(DeskData { handed_over, drafts: [id(0)?, id(1)?] })
    }

    /// A plan for the dead letters of `orders`, which is stored as paused so that it sends nothing.
    async fn paused_plan(&self) -> Result<()> {
        let plan = "INSERT INTO replay_plans (state, active, selection, progress, created_by, created_at, changed_at)
            VALUES ('paused', 1, '{\"topics\": [{\"topic\": \"orders\", \"to\": \"9-0\"}], \"max_replays\": 3}',
                '{\"total\": 4, \"step\": 1, \"step_size\": 4}', 'ann',
                extract(epoch FROM now())::bigint * 1000, extract(epoch FROM now())::bigint * 1000)";
        self.database.query(plan).map(drop)
    }
}

/// The failures, when all sources had the time to read all of theirs.
pub(crate) async fn all_failures(server: &Server) -> Result<Value> {
    let is_whole = |_: u16, failures: &Value| {
        let sources = failures["sources"].as_array();
        let is_read = |one: &Value| one["problem"].is_null() && one["unread"] == json!([]);
        sources.is_some_and(|all| all.iter().all(is_read))
    };
    server.until("/api/v1/failures", is_whole).await
}

/// A browser on a server.
pub(crate) struct Reader {
    pub(crate) browser: Browser,
    origin: String,
}

impl Reader {
    pub(crate) async fn start(server: &Server, scripts: BrowserScripts) -> Result<Self> {
        let browser = Browser::start(scripts).await?;
        Ok(Self { browser, origin: server.url("") })
    }

    pub(crate) fn driver(&self) -> &WebDriver {
        self.browser.driver()
    }

    /// Opens a page and returns its text.
    pub(crate) async fn open(&self, path: &str) -> Result<String> {
        self.driver()
            .goto(&format!("{}{path}", self.origin))
            .await
            .with_context(|| path.to_owned())?;
        self.text().await
    }

    /// Opens a page that shows these texts, and returns its text. It is opened again while it lacks one, because parts are left out
    /// that the server could not read within their time; a search until each of its sources had the time to look at everything.
    pub(crate) async fn open_whole(&self, path: &str, wanted: &[String]) -> Result<String> {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            let text = self.open(path).await?;
            let is_whole = !path.starts_with("/console/search?") || is_whole_search_page(&text);
            if is_whole && wanted.iter().all(|part| text.contains(part)) {
                return Ok(text);
            }
            ensure!(
                std::time::Instant::now() < deadline,
                "{path} does not show {wanted:?}:\n{text}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// Waits until so many new rows are offered, in view.
    pub(crate) async fn until_offered(&self, count: usize) -> Result<()> {
        self.until(&format!(
            "return document.querySelector('#new-rows button')?.textContent === '{count} new'"
        ))
        .await?;
        let is_in_view = "const button = document.querySelector('#new-rows button'); const box = button.getBoundingClientRect();
            return box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth
                && document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2) === button";
        ensure!(self.driver().execute(is_in_view).await? == true, "the offer is not in view");
        Ok(())
    }

    /// The text of the page as a reader sees it.
    pub(crate) async fn text(&self) -> Result<String> {
        // The browser's own text, with tabs between the cells of tables: that of WebDriver looks at the style of every element.
        let text = self.driver().execute("return document.body?.innerText ?? ''").await?;
        Ok(text.as_str().context("a text")?.replace('\t', " "))
    }

    /// Waits for an element: after a click the browser may show no page for a moment.
    pub(crate) async fn find(&self, css: &str) -> Result<WebElement> {
        self.until_found(css, async || self.driver().find(css).await).await
    }

    /// The same by XPath.
    pub(crate) async fn find_xpath(&self, xpath: &str) -> Result<WebElement> {
        self.until_found(xpath, async || self.driver().find_xpath(xpath).await).await
    }

    async fn until_found(
        &self,
        what: &str,
        find: impl AsyncFn() -> Result<WebElement>,
    ) -> Result<WebElement> {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            match find().await {
                Err(error) if std::time::Instant::now() >= deadline => {
                    let text = self.text().await.unwrap_or_default();
                    return Err(error.context(format!("{what} is not in the page:\n{text}")));
                }
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
                found => return found,
            }
        }
    }

    /// A number that a script returns.
    pub(crate) async fn number(&self, script: &str) -> Result<i64> {
        self.driver().execute(script).await?.as_i64().with_context(|| script.to_owned())
    }

    /// Waits until a script returns true. It may fail: after a click the browser may show no page for a moment.
    pub(crate) async fn until(&self, script: &str) -> Result<()> {
        let deadline = std::time::Instant::now() + LIMIT;
        while !self.driver().execute(script).await.is_ok_and(|value| value == true) {
            ensure!(std::time::Instant::now() < deadline, "{script} stays false");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// Clicks the first button or link with this label.
    pub(crate) async fn click(&self, label: &str) -> Result<()> {
        // Not one that scripts would show.
        let xpath =
            format!("//*[self::button or self::a][normalize-space(.)='{label}'][not(@hidden)]");
        self.find_xpath(&xpath).await?.click().await.with_context(|| label.to_owned())
    }

    /// Clicks the button of the only form in the content of the page: the confirmation of an action.
    pub(crate) async fn confirm(&self) -> Result<()> {
        self.find("main form.stacked button[type=submit]").await?.click().await
    }

    /// Types into the field with this id.
    pub(crate) async fn fill(&self, id: &str, text: &str) -> Result<()> {
        let field = self.find(&format!("#{id}")).await?;
        field.clear().await?;
        field.send_keys(text).await
    }

    /// Waits until the page shows this text.
    pub(crate) async fn until_shown(&self, wanted: &str) -> Result<()> {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            let text = self.text().await.unwrap_or_default();
            if text.contains(wanted) {
                return Ok(());
            }
            ensure!(std::time::Instant::now() < deadline, "{wanted:?} is not shown:\n{text}");
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// Opens a page again until it shows this: what the console has read is shown for a second.
    pub(crate) async fn until_reopened(&self, path: &str, wanted: &str) -> Result<()> {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            let text = self.open(path).await?;
            if text.contains(wanted) {
                return Ok(());
            }
            ensure!(
                std::time::Instant::now() < deadline,
                "{path} does not show {wanted:?}:\n{text}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    /// The path of the page.
    pub(crate) async fn path(&self) -> Result<String> {
        let url = self.driver().current_url().await?;
        Ok(url.trim_start_matches(&self.origin).to_owned())
    }

    /// Fails if anything went wrong in the browser, except these.
    pub(crate) async fn must_be_clean(&self, expected: &[&str]) -> Result<()> {
        let mut problems = self.browser.problems(&self.origin).await?;
        problems.retain(|problem| !expected.iter().any(|part| problem.contains(part)));
        ensure!(problems.is_empty(), "the browser reports problems: {problems:#?}");
        Ok(())
    }

    /// Fails if the page violates the rules of accessibility, or is wider than the window.
    pub(crate) async fn must_be_accessible(&self, path: &str) -> Result<()> {
        let violations = self.browser.accessibility_violations().await?;
        ensure!(violations.is_empty(), "{path} violates: {violations:#?}");
        self.must_fit(path).await
    }

    /// Fails if the colors of the page violate the rules of accessibility. For a page that satisfies them in other colors.
    pub(crate) async fn must_have_contrast(&self, path: &str) -> Result<()> {
        let violations = self.browser.contrast_violations().await?;
        ensure!(violations.is_empty(), "{path} violates: {violations:#?}");
        Ok(())
    }

    /// Fails if the page is wider than the window.
    pub(crate) async fn must_fit(&self, path: &str) -> Result<()> {
        let script =
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth";
        let wider = self.driver().execute(script).await?.as_i64().context("a number")?;
        ensure!(wider <= 0, "{path} is {wider} px wider than the window");
        Ok(())
    }

    /// Writes a picture to `$HEADWATER_SCREENSHOTS`, if it is set.
    pub(crate) async fn picture(&self, name: &str) -> Result<()> {
        if let Some(folder) = std::env::var_os("HEADWATER_SCREENSHOTS") {
            let file = std::path::Path::new(&folder).join(format!("{name}.png"));
            std::fs::create_dir_all(&folder)?;
            std::fs::write(file, STANDARD.decode(self.driver().screenshot().await?)?)?;
        }
        Ok(())
    }
}
