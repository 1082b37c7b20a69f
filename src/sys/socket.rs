//! What sockets do beyond `socket2`: passing descriptors, and telling who is at the other end.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{retry, syscall};

/// The most descriptors that one message carries.
pub const MAX_FDS: usize = 4;

/// Room for the control message of [`MAX_FDS`] descriptors, aligned as its header needs.
#[repr(C, align(8))]
struct ControlBuffer([u8; 64]);

/// Sends `bytes` on a connected socket, with `fds` (at most [`MAX_FDS`]; Unix sockets only) attached to the
/// first of them. Returns how many bytes went; if any did, all descriptors did. Never blocks, never raises
/// SIGPIPE.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    assert!(fds.len() <= MAX_FDS);
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: a msghdr of zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let payload = size_of_val(fds) as u32;
        message.msg_control = (&raw mut control).cast();
        // SAFETY: CMSG_SPACE is arithmetic. Four descriptors need 32 bytes, half of the buffer.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(payload) } as _;
        // SAFETY: the buffer is aligned and long enough for one header and its payload, so CMSG_FIRSTHDR is
        // inside it and CMSG_DATA has room for all descriptors. A BorrowedFd is a c_int by its layout
        // guarantee.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(payload) as _;
            std::ptr::copy_nonoverlapping(fds.as_ptr().cast(), libc::CMSG_DATA(header), payload as usize);
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` points to `part` and `control`, which outlive the call; the kernel only reads them.
    let sent = retry(|| unsafe { syscall!(sendmsg(socket.as_raw_fd(), &message, flags)) })?;
    Ok(sent as usize)
}

/// Receives at most `into.len()` bytes from a connected socket and appends the descriptors that came with
/// them, closed on exec, to `fds`. `Ok(0)` is the end of the stream. Never blocks.
pub fn receive(socket: BorrowedFd<'_>, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut part = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let mut control = ControlBuffer([0; 64]);
    // SAFETY: a msghdr of zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    // SAFETY: CMSG_SPACE is arithmetic; the result is half of the buffer.
    message.msg_controllen = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<libc::c_int>()) as u32) } as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` points to `part` and `control`, which outlive the call and are writable for the
    // lengths given.
    let received = retry(|| unsafe { syscall!(recvmsg(socket.as_raw_fd(), &mut message, flags)) })?;
    // SAFETY: the kernel filled `control` and set its length; the CMSG functions stay inside that length. The
    // descriptors in an SCM_RIGHTS message are new and belong to nobody else.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let payload = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let first: *const libc::c_int = libc::CMSG_DATA(header).cast();
                for index in 0..payload / size_of::<libc::c_int>() {
                    fds.push(OwnedFd::from_raw_fd(first.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(received as usize)
}

/// The process at the other end of a Unix socket when it connected or listened, as this process' pid
/// namespace counts; `None` when it is not visible from here.
pub fn peer_pid(socket: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let option = (&raw mut peer).cast();
    // SAFETY: the kernel writes at most `len` bytes into `peer`, which is that long.
    unsafe {
        syscall!(getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, option, &mut len))
    }?;
    Ok(u32::try_from(peer.pid).ok().filter(|&pid| pid != 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn descriptors_travel_with_bytes() {
        let (left, right) = UnixStream::pair().unwrap();
        let mut file = std::fs::File::from(crate::sys::memory::memfd(c"test", 4).unwrap());
        file.write_all(b"memo").unwrap();
        assert_eq!(send(left.as_fd(), b"hello", &[file.as_fd(), left.as_fd()]).unwrap(), 5);
        let (mut bytes, mut fds) = ([0; 16], Vec::new());
        assert_eq!(receive(right.as_fd(), &mut bytes, &mut fds).unwrap(), 5);
        assert_eq!((&bytes[..5], fds.len()), (&b"hello"[..], 2));
        let mut same = std::fs::File::from(fds.swap_remove(0));
        same.rewind().unwrap();
        let mut text = String::new();
        same.read_to_string(&mut text).unwrap();
        assert_eq!(text, "memo");
        let nothing = receive(right.as_fd(), &mut bytes, &mut fds).unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(peer_pid(right.as_fd()).unwrap(), Some(std::process::id()));
    }
}
