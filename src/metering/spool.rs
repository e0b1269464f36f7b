//! Batches on disk until the control plane has them.
//!
//! A file is written beside its name, synced and renamed, so there are whole files only; it is named by the time
//! it began (`meter-<13 digits: ms since the epoch>-<8 digits>.buf`), so names sort by age. What is no batch of
//! ours is renamed to `.bad` and left for a person.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// Why there is no spool.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// Another process has it.
    #[error(
        "QUEEN_PROXY_SPOOL_DIR: {} is in use by another proxy; each needs a folder of its own",
        .0.display()
    )]
    InUse(PathBuf),
    /// The folder cannot be used.
    #[error("QUEEN_PROXY_SPOOL_DIR: cannot use {}: {reason}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The system's word.
        reason: io::Error,
    },
}

/// The folder, which is this process's alone while this lives.
#[derive(Debug)]
pub(super) struct Spool {
    folder: PathBuf,
    /// Held open: the lock goes with it.
    _lock: File,
    /// Names with sizes, oldest first.
    files: BTreeMap<String, u64>,
    /// For the next name.
    number: u32,
}

impl Spool {
    /// Makes the folder when it is not there, locks it, and finds what an earlier process left.
    pub(super) fn open(folder: &Path) -> Result<Self, SpoolError> {
        let failed = |reason| SpoolError::Folder { folder: folder.to_owned(), reason };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(folder.join("lock"))
            .map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(SpoolError::InUse(folder.to_owned())),
            Err(TryLockError::Error(reason)) => return Err(failed(reason)),
        }
        let mut spool = Self { folder: folder.to_owned(), _lock: lock, files: BTreeMap::new(), number: 0 };
        for entry in fs::read_dir(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let size = entry.metadata().map_err(failed)?.len();
            let is = |suffix: &str| Path::new(&name).extension() == Some(OsStr::new(suffix));
            if is("tmp") {
                // A process ended while it wrote; nobody was told that this is kept.
                let _ = fs::remove_file(entry.path());
            } else if is("buf") {
                match name.to_str().filter(|name| began_ms(name).is_some()) {
                    Some(name) => drop(spool.files.insert(name.to_owned(), size)),
                    None => spool.rename_to_bad(&name),
                }
            }
        }
        Ok(spool)
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.values().sum()
    }

    /// How many files there are.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// Bytes of one file; zero when it is not there.
    pub(super) fn size(&self, name: &str) -> u64 {
        self.files.get(name).copied().unwrap_or(0)
    }

    /// The files, oldest first.
    pub(super) fn names(&self) -> Vec<String> {
        self.files.keys().cloned().collect()
    }

    /// A name that no file has, and none that gets its name after it.
    pub(super) fn fresh_name(&mut self, now_ms: u64) -> String {
        loop {
            let name = format!("meter-{now_ms:013}-{:08}.buf", self.number);
            self.number = (self.number + 1) % 100_000_000;
            if !self.files.contains_key(&name) {
                return name;
            }
        }
    }

    /// Writes a file, in place of an earlier one of the name. It is there when this returns, also after the
    /// power fails; after an error the earlier one is.
    pub(super) fn store(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let beside = self.folder.join(name).with_extension("tmp");
        let written = self.write(&beside, name, bytes);
        if written.is_err() {
            let _ = fs::remove_file(&beside);
        } else {
            self.files.insert(name.to_owned(), bytes.len() as u64);
        }
        written
    }

    fn write(&self, beside: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(beside, self.folder.join(name))?;
        File::open(&self.folder)?.sync_all()
    }

    /// Reads a file.
    pub(super) fn load(&self, name: &str) -> io::Result<Vec<u8>> {
        fs::read(self.folder.join(name))
    }

    /// Removes a file that is not needed any more, if it is there. If that fails, its batch is sent again one day, which counts
    /// nothing.
    pub(super) fn remove(&mut self, name: &str) {
        if self.files.remove(name).is_none() {
            return;
        }
        if let Err(error) = fs::remove_file(self.folder.join(name)) {
            tracing::warn!(name, %error, "spool: a file that was delivered cannot be removed");
        }
    }

    /// Puts a file aside for a person to look at.
    pub(super) fn set_aside(&mut self, name: &str) {
        self.files.remove(name);
        self.rename_to_bad(OsStr::new(name));
    }

    fn rename_to_bad(&self, name: &OsStr) {
        let path = self.folder.join(name);
        match fs::rename(&path, path.with_extension("bad")) {
            Ok(()) => tracing::error!(?name, "spool: a file was set aside, with the ending .bad"),
            Err(error) => tracing::error!(?name, %error, "spool: a file cannot be set aside"),
        }
    }
}

/// When a file began, by its name; none: it is no name of ours.
pub(super) fn began_ms(name: &str) -> Option<u64> {
    let (time, number) = name.strip_prefix("meter-")?.strip_suffix(".buf")?.split_once('-')?;
    let digits = |text: &str, count| text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits(time, 13) && digits(number, 8) { time.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ours() {
        for (name, expected) in [
            ("meter-0000000000012-00000003.buf", Some(12)),
            ("meter-1764500000000-00000000.buf", Some(1_764_500_000_000)),
            ("meter-1764500000000-00000000.bad", None),
            ("meter-1764500000000-0.buf", None),
            ("meter-176450000000x-00000000.buf", None),
            ("meter-+764500000000-00000000.buf", None),
            ("other-1764500000000-00000000.buf", None),
            ("meter-1764500000000.buf", None),
        ] {
            assert_eq!(began_ms(name), expected, "{name}");
        }
    }

    #[test]
    fn a_folder_belongs_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let first = Spool::open(&path).unwrap();
        let error = Spool::open(&path).unwrap_err();
        assert!(error.to_string().ends_with("is in use by another proxy; each needs a folder of its own"));
        drop(first);
        Spool::open(&path).unwrap();
        let error = Spool::open(Path::new("/dev/null/spool")).unwrap_err();
        assert!(
            error.to_string().starts_with("QUEEN_PROXY_SPOOL_DIR: cannot use /dev/null/spool: "),
            "{error}"
        );
    }

    #[test]
    fn what_an_earlier_process_left() {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(folder.path()).unwrap();
        let names: Vec<String> = [5, 5, 3]
            .map(|now_ms| {
                let name = spool.fresh_name(now_ms);
                spool.store(&name, b"12345").unwrap();
                name
            })
            .into();
        assert_eq!(names[1], "meter-0000000000005-00000001.buf");
        assert_ne!(spool.fresh_name(9), spool.fresh_name(9));
        spool.store(&names[0], b"123").unwrap();
        assert_eq!((spool.bytes(), spool.len(), spool.size(&names[0])), (13, 3, 3));
        drop(spool);
        for (name, text) in [("half.tmp", "x"), ("foreign.buf", "x"), ("note.txt", "x")] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let mut spool = Spool::open(folder.path()).unwrap();
        assert_eq!(spool.fresh_name(5), "meter-0000000000005-00000002.buf", "the clock was put back");
        assert_eq!(spool.names(), [&*names[2], &*names[0], &*names[1]], "oldest first");
        assert_eq!(spool.bytes(), 13);
        assert_eq!(spool.load(&names[0]).unwrap(), b"123");
        spool.remove(&names[0]);
        spool.set_aside(&names[1]);
        let mut left: Vec<String> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let bad = names[1].replace(".buf", ".bad");
        assert_eq!(left, ["foreign.bad", "lock", &names[2], &bad, "note.txt"]);
    }

    #[test]
    fn a_disk_that_fails_leaves_things_as_they_were() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spool");
        let mut spool = Spool::open(&path).unwrap();
        spool.store("meter-0000000000001-00000000.buf", b"1").unwrap();
        fs::rename(&path, folder.path().join("gone")).unwrap();
        spool.store("meter-0000000000001-00000000.buf", b"12").unwrap_err();
        spool.store("meter-0000000000002-00000000.buf", b"12").unwrap_err();
        assert_eq!((spool.bytes(), spool.len()), (1, 1));
    }
}
