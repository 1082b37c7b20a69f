//! Files that results go to: whether one can be written is seen before anything is measured, and what it had
//! stays until the new content is there as a whole.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Whether `path` can be written, as far as can be told without doing so.
pub(super) fn try_out(path: &Path) -> Result<()> {
    // Made anew at the end: whoever is ended meanwhile leaves nothing behind.
    let tried = Target::of(path).and_then(|target| match target {
        Target::Stream => Ok(()),
        Target::Place(place) => Temporary::beside(&place).map(drop),
    });
    tried.map_err(|cause| cannot_write(path, cause))
}

/// Gives the file this content.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    let replaced = Target::of(path).and_then(|target| match target {
        Target::Stream => fs::write(path, text),
        Target::Place(place) => Temporary::beside(&place)?.replace(&place, text),
    });
    replaced.map_err(|cause| cannot_write(path, cause))
}

fn cannot_write(path: &Path, cause: io::Error) -> Error {
    Error::system(format!("cannot write {}", path.display()), cause)
}

/// What a path names.
enum Target {
    /// A device or a pipe: nothing can take its place, and whoever opens it to try could end it for its
    /// reader.
    Stream,
    /// A file, or where one may be, links followed.
    Place(PathBuf),
}

impl Target {
    fn of(path: &Path) -> io::Result<Target> {
        match fs::metadata(path) {
            Ok(found) if found.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if found.is_file() => fs::canonicalize(path).map(Target::Place),
            Ok(_) => Ok(Target::Stream),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(Target::Place(path.to_owned())),
            Err(cause) => Err(cause),
        }
    }
}

/// A new file beside another, gone when this is dropped.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn beside(place: &Path) -> io::Result<Temporary> {
        let Some(name) = place.file_name() else { return Err(io::ErrorKind::InvalidInput.into()) };
        let mut name = name.to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let path = place.with_file_name(name);
        let file = File::create_new(&path)?;
        Ok(Temporary { path, file })
    }

    fn replace(mut self, place: &Path, text: &str) -> io::Result<()> {
        self.file.write_all(text.as_bytes())?;
        if let Ok(before) = fs::metadata(place) {
            self.file.set_permissions(before.permissions())?;
        }
        fs::rename(&self.path, place)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Without effect where it has got its place.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it() {
        let folder = std::env::temp_dir().join(format!("unisono-replace-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("the folder for temporary files can be written to");
        let (file, link) = (folder.join("file"), folder.join("link"));
        try_out(&file).expect("it may be made");
        assert!(!file.exists());
        replace(&file, "new").expect("it may be made");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("it is ours");
        symlink("file", &link).expect("the folder can be written to");
        try_out(&link).expect("it leads to a file");
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "new");
        replace(&link, "newer").expect("it leads to a file");
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "newer");
        assert_eq!(fs::metadata(&file).expect("it is there").permissions().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).expect("it is there").is_symlink());
        assert_eq!(fs::read_dir(&folder).expect("it is there").count(), 2);
        for bad in [folder.join("none/file"), folder.clone(), folder.join("..")] {
            let told = try_out(&bad).expect_err("no file can be there");
            assert!(told.text().contains("cannot write"), "{told}");
        }
        try_out(Path::new("/dev/null"))
            .and_then(|()| replace(Path::new("/dev/null"), "x"))
            .expect("it takes all");
        fs::remove_dir_all(&folder).expect("it is ours");
    }
}
