//! Models by their names on huggingface.co: the files come into the cache that Hugging Face's own programs use, and from it where they are
//! there already.

use std::path::{Path, PathBuf};

use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress,
        sync::{ApiBuilder, ApiRepo},
    },
};
use serde_json::Value;

use crate::{
    error::Error,
    files::{INDEX, WHOLE, is_inside},
};

/// A model's name in parts: `owner/model`, `owner/model/file.gguf`, each with `@revision` behind the model.
#[derive(Debug, PartialEq)]
struct Name<'a> {
    model: String,
    revision: &'a str,
    file: Option<&'a str>,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let is_part = |part: &str| {
            let is_legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            part.chars().all(is_legal) && part.chars().any(|c| c != '.')
        };
        let mut parts = name.splitn(3, '/');
        let (owner, model, file) = (parts.next()?, parts.next()?, parts.next());
        let (model, revision) = model.split_once('@').unwrap_or((model, "main"));
        let is_legal = [owner, model, revision].into_iter().all(is_part)
            && file.is_none_or(|file| file.split('/').all(is_part) && file.ends_with(".gguf"));
        is_legal.then(|| Name {
            model: format!("{owner}/{model}"),
            revision,
            file,
        })
    }
}

/// Reports bytes of a file to a caller's function.
struct Report<'a> {
    file: &'a str,
    done: usize,
    of: usize,
    progress: &'a mut dyn FnMut(&str, usize, usize),
}

impl Progress for Report<'_> {
    fn init(&mut self, size: usize, _: &str) {
        self.of = size;
    }

    fn update(&mut self, size: usize) {
        self.done += size;
        (self.progress)(self.file, self.done, self.of);
    }

    fn finish(&mut self) {}
}

/// One model's files.
struct Files<'a> {
    name: &'a str,
    cache: hf_hub::CacheRepo,
    repo: ApiRepo,
    progress: &'a mut dyn FnMut(&str, usize, usize),
}

/// Fetches a model and gives the path for [`crate::load()`]: `owner/model` is a folder with `config.json`, `tokenizer.json` and all safetensors,
/// `owner/model/FILE.gguf` that file; `@revision` may follow the model's name. Files that are in the cache need no network.
///
/// `progress` gets a file's name, the bytes of it that are here, and all of its bytes. The environment says where the cache is (`HF_HOME`) and which
/// server is asked (`HF_ENDPOINT`); the token of Hugging Face's `login` is sent.
///
/// # Errors
/// [`Error::Request`] for a name of another form; [`Error::Hub`] if a file cannot be had.
pub fn fetch(name: &str, progress: &mut dyn FnMut(&str, usize, usize)) -> Result<PathBuf, Error> {
    let parts = Name::parse(name).ok_or_else(|| Error::Request {
        what: "the model's name",
        given: name.to_owned(),
        allowed: "owner/model, or owner/model/file.gguf; @revision may follow the model".to_owned(),
    })?;
    let revision = parts.revision.to_owned();
    let repo = Repo::with_revision(parts.model, RepoType::Model, revision);
    let api = ApiBuilder::from_env().with_progress(false).build();
    let api = api.map_err(|e| refused(name, e.to_string()))?;
    let mut files = Files {
        name,
        cache: Cache::from_env().repo(repo.clone()),
        repo: api.repo(repo),
        progress,
    };
    match parts.file {
        Some(file) => files.get(file),
        None => files.folder(),
    }
}

fn refused(name: &str, reason: String) -> Error {
    Error::Hub {
        name: name.to_owned(),
        reason,
    }
}

impl Files<'_> {
    /// The path of a file, which is fetched if the cache lacks it.
    fn get(&mut self, file: &str) -> Result<PathBuf, Error> {
        if !is_inside(file) {
            return Err(refused(self.name, format!("it has a file called {file:?}")));
        }
        if let Some(path) = self.cache.get(file) {
            return Ok(path);
        }
        let report = Report {
            file,
            done: 0,
            of: 0,
            progress: self.progress,
        };
        let fetched = self.repo.download_with_progress(file, report);
        fetched.map_err(|e| refused(self.name, format!("{file}: {e}")))
    }

    fn folder(&mut self) -> Result<PathBuf, Error> {
        let is_here = |file: &&str| self.cache.get(file).is_some();
        let weights = match [WHOLE, INDEX].into_iter().find(is_here) {
            Some(file) => file,
            None => self.weights()?,
        };
        let config = self.get("config.json")?;
        self.get("tokenizer.json")?;
        match weights {
            INDEX => self.shards()?,
            file => drop(self.get(file)?),
        }
        let folder = config.parent().map(Path::to_owned);
        folder.ok_or_else(|| refused(self.name, "its cache has no folder".to_owned()))
    }

    /// Which of its files a model begins with, by the server's list.
    fn weights(&self) -> Result<&'static str, Error> {
        let info = self.repo.info();
        let info = info.map_err(|e| refused(self.name, format!("its list of files: {e}")))?;
        let names = || info.siblings.iter().map(|file| file.rfilename.as_str());
        let weights = [WHOLE, INDEX].into_iter();
        let found = weights
            .into_iter()
            .find(|file| names().any(|name| name == *file));
        found.ok_or_else(|| {
            let ggufs: Vec<_> = names().filter(|name| name.ends_with(".gguf")).collect();
            let reason = format!(
                "it has no safetensors; append one of its GGUF files to the name, /FILE.gguf: {}",
                ggufs.join(", ")
            );
            refused(self.name, reason)
        })
    }

    /// Fetches all files of the index.
    fn shards(&mut self) -> Result<(), Error> {
        let path = self.get(INDEX)?;
        let bytes = std::fs::read(&path).map_err(|source| Error::File { path, source })?;
        let json: Value = serde_json::from_slice(&bytes)
            .map_err(|e| refused(self.name, format!("{INDEX}: {e}")))?;
        let files = json["weight_map"].as_object().into_iter().flatten();
        let mut files: Vec<&str> = files.filter_map(|(_, file)| file.as_str()).collect();
        files.sort_unstable();
        files.dedup();
        for file in files {
            self.get(file)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_in_parts_and_others_refused() {
        let name = |model: &str, revision, file| {
            let model = model.to_owned();
            Some(Name {
                model,
                revision,
                file,
            })
        };
        assert_eq!(Name::parse("a/b-1.5"), name("a/b-1.5", "main", None));
        assert_eq!(
            Name::parse("a/b@v1/x/y.gguf"),
            name("a/b", "v1", Some("x/y.gguf"))
        );
        let wrong = [
            "",
            "a",
            "a/",
            "/b",
            "a/b/",
            "../b",
            "a/b/../x.gguf",
            "a/b/x.bin",
            "a/b@",
            "a b/c",
            "a/b?x=1",
            "a/b@../x",
        ];
        for name in wrong {
            assert_eq!(Name::parse(name), None, "{name}");
        }
    }
}
