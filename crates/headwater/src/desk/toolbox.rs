//! The tools of a desk: which ones an issue may use, and whether the arguments of a call are valid.
//!
//! Upstream: `build` registers the tools of settings and of the embedding program. Downstream: `tool_calls`. No I/O.
//! Guarantees: names are unique and differ from those of the built-in tools; every schema is valid and refers to nothing outside;
//! an issue sees only the tools of its integration.

use std::collections::HashSet;
use std::sync::Arc;

use boon::{Compiler, SchemaIndex, Schemas, UrlLoader};
use headwater_issue::Issue;
use serde_json::Value as Json;

use crate::desk::model::ToolSpec;
use crate::desk::tool::{Tool, ToolDefinition};
use crate::desk::tools::{self, BUILT_IN};
use crate::limits::{
    TOOL_DESCRIPTION_BYTES_MAX, TOOL_SCHEMA_BYTES_MAX, TOOL_TIMEOUT_MAX, TOOL_TIMEOUT_MIN,
    TOOLS_MAX,
};
use crate::text;

/// Maximum length of a name, as models allow it.
const NAME_CHARS_MAX: usize = 64;

/// Maximum bytes of a problem that the model is told.
const PROBLEM_BYTES_MAX: usize = 500;

/// Why a tool cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidTool {
    /// Its name is not allowed.
    #[error("invalid name `{0}`; allowed: 1 to {NAME_CHARS_MAX} letters, digits, `-` and `_`")]
    Name(String),
    /// A built-in tool has this name.
    #[error("`{0}` is the name of a built-in tool; choose another one")]
    BuiltIn(String),
    /// Two tools have this name.
    #[error("duplicate name `{0}`; it must be unique")]
    Duplicate(String),
    /// Too many tools.
    #[error("there are {0} tools; at most {TOOLS_MAX} are allowed")]
    TooMany(usize),
    /// Another field is invalid.
    #[error("`{name}` has an invalid `{field}`: {problem}")]
    Field {
        /// The tool.
        name: String,
        /// The field.
        field: &'static str,
        /// What is wrong, and what is allowed.
        problem: String,
    },
}

impl InvalidTool {
    pub(crate) fn field(name: &str, field: &'static str, problem: impl Into<String>) -> Self {
        Self::Field { name: name.to_owned(), field, problem: problem.into() }
    }
}

/// A compiled JSON Schema.
struct ArgumentSchema {
    schemas: Schemas,
    index: SchemaIndex,
}

impl std::fmt::Debug for ArgumentSchema {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ArgumentSchema")
    }
}

/// Refuses to load schemas: the default loader reads files.
struct NoLoader;

impl UrlLoader for NoLoader {
    fn load(&self, url: &str) -> Result<Json, Box<dyn std::error::Error>> {
        Err(format!("`{url}` is not part of the schema").into())
    }
}

impl ArgumentSchema {
    fn compile(schema: &Json) -> Result<Self, String> {
        const LOCATION: &str = "urn:headwater:parameters";
        if schema.get("type").and_then(Json::as_str) != Some("object") {
            return Err("its `type` must be `object`".to_owned());
        }
        if schema.to_string().len() > TOOL_SCHEMA_BYTES_MAX {
            return Err(format!("it is longer than {TOOL_SCHEMA_BYTES_MAX} bytes"));
        }
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        compiler.use_loader(Box::new(NoLoader));
        compiler.add_resource(LOCATION, schema.clone()).map_err(|error| error.to_string())?;
        let index = compiler.compile(LOCATION, &mut schemas);
        let index = index.map_err(|error| text::one_line(&format!("{error:#}"), 300))?;
        Ok(Self { schemas, index })
    }

    fn check(&self, arguments: &Json) -> Result<(), String> {
        self.schemas.validate(arguments, self.index).map_err(|problem| {
            let problem = text::one_line(&problem.to_string(), PROBLEM_BYTES_MAX);
            format!("the arguments do not match the schema: {problem}")
        })
    }
}

/// A tool with its compiled schema.
#[derive(Clone, Debug)]
struct CheckedTool {
    tool: Arc<dyn Tool>,
    schema: Arc<ArgumentSchema>,
}

/// The tools of a desk beside the built-in ones. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Toolbox(Vec<CheckedTool>);

impl Toolbox {
    /// Checks the definitions of these tools.
    pub fn new(tools: Vec<Arc<dyn Tool>>) -> Result<Self, InvalidTool> {
        if tools.len() > TOOLS_MAX {
            return Err(InvalidTool::TooMany(tools.len()));
        }
        let mut names = HashSet::new();
        for tool in &tools {
            let name = &tool.definition().name;
            if !names.insert(name.clone()) {
                return Err(InvalidTool::Duplicate(name.clone()));
            }
        }
        tools.into_iter().map(checked).collect::<Result<_, _>>().map(Self)
    }

    /// The tools that a run of this issue may use, the built-in ones first.
    pub fn specs(&self, issue: &Issue) -> Vec<ToolSpec> {
        let of_issue = self.0.iter().map(|one| one.tool.definition());
        let of_issue = of_issue.filter(|one| one.is_for(&issue.integration)).map(|one| ToolSpec {
            name: one.name.clone(),
            description: one.description.clone(),
            parameters: one.parameters.clone(),
        });
        tools::specs(issue).into_iter().chain(of_issue).collect()
    }

    /// The names of all tools.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|one| one.tool.definition().name.as_str())
    }

    /// Whether a run of this issue may end with a call that needs an approval.
    pub(super) fn may_need_approval(&self, issue: &Issue) -> bool {
        let mut definitions = self.0.iter().map(|one| one.tool.definition());
        definitions.any(|one| one.approval && one.is_for(&issue.integration))
    }

    /// The tool with this name, if issues of this integration may use it.
    pub(super) fn find(&self, name: &str, integration: &str) -> Option<&Arc<dyn Tool>> {
        self.find_checked(name, integration).map(|one| &one.tool)
    }

    /// Parses and checks the arguments of a call.
    pub(super) fn arguments(
        &self,
        name: &str,
        integration: &str,
        arguments: &str,
    ) -> Result<Json, String> {
        let tool = self.find_checked(name, integration).ok_or("there is no such tool")?;
        // Some models send nothing if there is nothing to send.
        let given = if arguments.trim().is_empty() { "{}" } else { arguments };
        let arguments = serde_json::from_str(given)
            .map_err(|error| format!("the arguments are not JSON: {error}"))?;
        tool.schema.check(&arguments)?;
        Ok(arguments)
    }

    fn find_checked(&self, name: &str, integration: &str) -> Option<&CheckedTool> {
        let mut tools = self.0.iter();
        let of = |one: &&CheckedTool| one.tool.definition().name == name;
        tools.find(of).filter(|one| one.tool.definition().is_for(integration))
    }
}

fn checked(tool: Arc<dyn Tool>) -> Result<CheckedTool, InvalidTool> {
    let ToolDefinition { name, description, parameters, timeout, .. } = tool.definition();
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_".contains(letter);
    if !(1..=NAME_CHARS_MAX).contains(&name.len()) || !name.chars().all(is_plain) {
        return Err(InvalidTool::Name(text::one_line(name, NAME_CHARS_MAX)));
    }
    if BUILT_IN.contains(&name.as_str()) {
        return Err(InvalidTool::BuiltIn(name.clone()));
    }
    if description.trim().is_empty() || description.len() > TOOL_DESCRIPTION_BYTES_MAX {
        let problem = format!("allowed: 1 to {TOOL_DESCRIPTION_BYTES_MAX} bytes");
        return Err(InvalidTool::field(name, "description", problem));
    }
    if !(TOOL_TIMEOUT_MIN..=TOOL_TIMEOUT_MAX).contains(timeout) {
        let problem = format!("allowed: {TOOL_TIMEOUT_MIN:?} to {TOOL_TIMEOUT_MAX:?}");
        return Err(InvalidTool::field(name, "timeout", problem));
    }
    let schema = ArgumentSchema::compile(parameters)
        .map_err(|problem| InvalidTool::field(name, "parameters", problem))?;
    Ok(CheckedTool { tool, schema: Arc::new(schema) })
}
