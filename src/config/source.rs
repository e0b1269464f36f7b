//! One setting at a time from the environment, a secret file or the TOML file, with every mistake
//! collected so that one start names them all.

use crate::domain::secret::Secret;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    ops::RangeInclusive,
    path::Path,
    str::FromStr,
};

/// Every mistake of one configuration, a line each, without any value of a secret.
#[derive(Debug, thiserror::Error)]
#[error("the configuration is wrong:\n  {}", .0.join("\n  "))]
pub struct ConfigError(pub Vec<String>);

/// Where a value came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// An environment variable, or the file one names.
    Environment,
    /// The TOML file.
    File,
}

/// One line of `check`.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The environment variable.
    pub name: &'static str,
    /// The value in effect; secrets are masked, unset is empty.
    pub value: String,
    /// Who set it.
    pub origin: Origin,
}

/// The environment laid over the TOML file. A TOML key is the variable's name in lower case without
/// the program's prefix: `QUEEN_PROXY_PORT` is `port`, `PXDB_HOST` is `pxdb_host`.
pub struct Source {
    environment: BTreeMap<String, String>,
    file: BTreeMap<String, String>,
    prefix: &'static str,
    known: BTreeSet<String>,
    errors: Vec<String>,
    shown: Vec<Shown>,
}

impl Source {
    /// Reads the file, when there is one. What is wrong with it is reported by [`Self::finish`].
    pub fn new(
        prefix: &'static str,
        environment: impl IntoIterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Self {
        let mut source = Self {
            environment: environment.into_iter().collect(),
            file: BTreeMap::new(),
            prefix,
            known: BTreeSet::new(),
            errors: Vec::new(),
            shown: Vec::new(),
        };
        if let Some(path) = file {
            match std::fs::read_to_string(path) {
                Ok(text) => source.read_file(path, &text),
                Err(error) => source.errors.push(format!("{}: {error}", path.display())),
            }
        }
        source
    }

    fn read_file(&mut self, path: &Path, text: &str) {
        let table: toml::Table = match text.parse() {
            Ok(table) => table,
            Err(error) => {
                // The parser's message quotes the line, which may hold a secret; its place is enough.
                let at = error
                    .span()
                    .map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
                self.errors.push(format!("{}: not valid TOML near line {at}", path.display()));
                return;
            }
        };
        for (key, value) in table {
            let text = match value {
                toml::Value::String(text) => text,
                toml::Value::Integer(number) => number.to_string(),
                toml::Value::Boolean(flag) => flag.to_string(),
                _ => {
                    self.errors.push(format!("{key}: must be a string, a whole number or a boolean"));
                    continue;
                }
            };
            self.file.insert(key, text);
        }
    }

    /// The TOML key of a variable.
    fn key_of(&self, name: &str) -> String {
        name.strip_prefix(self.prefix).unwrap_or(name).to_ascii_lowercase()
    }

    fn raw(&mut self, name: &'static str) -> (Option<String>, Origin) {
        let key = self.key_of(name);
        self.known.insert(key.clone());
        if let Some(value) = self.environment.get(name) {
            if value.contains(char::REPLACEMENT_CHARACTER) {
                self.errors.push(format!("{name}: must be UTF-8 text"));
            }
            return (Some(value.clone()), Origin::Environment);
        }
        match self.file.get(&key) {
            Some(value) => (Some(value.clone()), Origin::File),
            None => (None, Origin::Default),
        }
    }

    fn show(&mut self, name: &'static str, value: impl Display, origin: Origin) {
        let value = value.to_string();
        // Certificates run over many lines; one is enough to know them by.
        let value = value.trim().split_once('\n').map_or(value.clone(), |(first, _)| format!("{first} …"));
        self.shown.push(Shown { name, value, origin });
    }

    /// A text that always has a value. An empty one is kept, except where `allow_empty` is false.
    pub fn text(&mut self, name: &'static str, default: &str, allow_empty: bool) -> String {
        let (raw, origin) = self.raw(name);
        let value = raw.unwrap_or_else(|| default.to_owned());
        if value.is_empty() && !allow_empty {
            self.errors.push(format!("{name}: must not be empty"));
        }
        self.show(name, &value, origin);
        value
    }

    /// A text that may be unset; empty is unset.
    pub fn optional(&mut self, name: &'static str) -> Option<String> {
        let (raw, origin) = self.raw(name);
        let value = raw.filter(|text| !text.is_empty());
        self.show(name, value.as_deref().unwrap_or_default(), origin);
        value
    }

    /// Something with a parser of its own that may be unset; `what` completes "must be …".
    pub fn parsed<T>(
        &mut self,
        name: &'static str,
        what: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let text = self.optional(name)?;
        let value = parse(&text);
        if value.is_none() {
            self.errors.push(format!("{name}: must be {what}"));
        }
        value
    }

    /// A whole number within a range.
    pub fn number<T>(&mut self, name: &'static str, default: T, range: RangeInclusive<T>) -> T
    where
        T: FromStr + PartialOrd + Display + Copy,
    {
        let (raw, origin) = self.raw(name);
        let value = match raw.as_deref().map(str::trim).filter(|text| !text.is_empty()) {
            None => default,
            Some(text) => match text.parse() {
                Ok(number) if range.contains(&number) => number,
                _ => {
                    self.errors.push(format!(
                        "{name}: must be a whole number from {} to {}",
                        range.start(),
                        range.end()
                    ));
                    default
                }
            },
        };
        self.show(name, value, origin);
        value
    }

    /// A switch: true/false, 1/0, yes/no, on/off in any case.
    pub fn flag(&mut self, name: &'static str, default: bool) -> bool {
        let (raw, origin) = self.raw(name);
        let value = match raw.as_deref().map(|text| text.trim().to_ascii_lowercase()).as_deref() {
            None | Some("") => default,
            Some("true" | "1" | "yes" | "on") => true,
            Some("false" | "0" | "no" | "off") => false,
            Some(_) => {
                self.errors.push(format!("{name}: must be one of true, false, 1, 0, yes, no, on, off"));
                default
            }
        };
        self.show(name, value, origin);
        value
    }

    /// A secret, from the variable, from the file that `file_name` names (a line end at its end is
    /// not part of it), or from the TOML file. Given twice is a mistake.
    pub fn secret(&mut self, name: &'static str, file_name: &'static str) -> Option<Secret> {
        let (direct, direct_origin) = self.raw(name);
        let (path, path_origin) = self.raw(file_name);
        let direct = direct.filter(|text| !text.is_empty());
        let path = path.filter(|text| !text.is_empty());
        let (value, origin) = match (direct, path) {
            (Some(_), Some(_)) => {
                self.errors.push(format!("{name} and {file_name}: give one of them, not both"));
                (None, Origin::Default)
            }
            (Some(value), None) => (Some(value), direct_origin),
            (None, Some(path)) => match std::fs::read_to_string(&path) {
                Ok(text) => {
                    let secret = text.trim_end_matches(['\r', '\n']);
                    if secret.is_empty() {
                        self.errors.push(format!("{file_name}: {path} is empty"));
                    }
                    (Some(secret.to_owned()).filter(|secret| !secret.is_empty()), path_origin)
                }
                Err(error) => {
                    self.errors.push(format!("{file_name}: cannot read {path}: {error}"));
                    (None, Origin::Default)
                }
            },
            (None, None) => (None, Origin::Default),
        };
        self.show(name, if value.is_some() { "***" } else { "" }, origin);
        value.map(Secret::new)
    }

    /// A text of which only a part may be shown: `parse` returns the value and that part. Empty is the default;
    /// `what` completes "must be …", and must not quote the text.
    pub fn masked<T>(
        &mut self,
        name: &'static str,
        default: &str,
        what: &str,
        parse: impl FnOnce(&str) -> Option<(T, String)>,
    ) -> Option<T> {
        let (raw, origin) = self.raw(name);
        let text = raw.filter(|text| !text.is_empty()).unwrap_or_else(|| default.to_owned());
        if let Some((value, shown)) = parse(&text) {
            self.show(name, shown, origin);
            return Some(value);
        }
        self.errors.push(format!("{name}: must be {what}"));
        None
    }

    /// Reports a mistake that concerns several settings.
    pub fn refuse(&mut self, message: impl Into<String>) {
        self.errors.push(message.into());
    }

    /// Variables with this program's prefix that are no setting: probably misspelt. They are not refused,
    /// because whoever runs containers gets some from the platform (`QUEEN_PROXY_SERVICE_HOST`).
    pub fn unknown_variables(&self) -> Vec<String> {
        let is_ours =
            |name: &&String| name.starts_with(self.prefix) && !self.known.contains(&self.key_of(name));
        self.environment.keys().filter(is_ours).cloned().collect()
    }

    /// Every setting read, or every mistake made.
    pub fn finish(mut self) -> Result<Vec<Shown>, ConfigError> {
        for key in self.file.keys() {
            if !self.known.contains(key) {
                self.errors.push(format!("{key}: there is no such setting in the configuration file"));
            }
        }
        if self.errors.is_empty() { Ok(self.shown) } else { Err(ConfigError(self.errors)) }
    }
}

/// The settings as `check` prints them.
pub fn print(shown: &[Shown]) -> String {
    let width = shown.iter().map(|line| line.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for line in shown {
        let origin = match line.origin {
            Origin::Default => "",
            Origin::Environment => "  (environment)",
            Origin::File => "  (file)",
        };
        text.push_str(format!("{:width$} = {}{origin}", line.name, line.value).trim_end());
        text.push('\n');
    }
    text
}

/// The process's environment. A value that is not text holds replacement characters, by which
/// [`Source`] refuses it when it is one of ours.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}
