//! A limited number of open files or shards.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Open resources by number; the least recently used one is closed for another.
///
/// There are two kinds of locks. The lock of all entries is held for a look-up only. The lock of an
/// entry is held while one thread opens it, and other threads that need it wait. No thread locks
/// an entry while it holds the lock of all.
#[derive(Debug)]
pub(crate) struct OpenCache<T> {
    capacity: usize,
    /// Ordered by their last use.
    entries: Mutex<VecDeque<CacheEntry<T>>>,
}

/// The number of a resource and the resource, or `None` until it is open.
type CacheEntry<T> = (u64, Arc<Mutex<Option<Arc<T>>>>);

impl<T> OpenCache<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, entries: Mutex::default() }
    }

    /// Returns a resource, which `open` opens if necessary.
    pub(crate) fn get<E>(
        &self,
        key: u64,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let (_, resource) = self.entry(key);
        let mut resource = resource.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(resource) = &*resource {
            return Ok(Arc::clone(resource));
        }
        Ok(Arc::clone(resource.insert(Arc::new(open()?))))
    }

    /// Returns true if the resource is open, or a thread is opening it.
    pub(crate) fn contains(&self, key: u64) -> bool {
        self.lock().iter().any(|entry| entry.0 == key)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<CacheEntry<T>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the entry of a resource, which is now the most recently used one.
    fn entry(&self, key: u64) -> CacheEntry<T> {
        let mut entries = self.lock();
        let position = entries.iter().rposition(|entry| entry.0 == key);
        let known = position.and_then(|position| entries.remove(position));
        let entry = known.unwrap_or_else(|| (key, Arc::default()));
        entries.push_back(entry.clone());
        let removed = if entries.len() > self.capacity { entries.pop_front() } else { None };
        drop(entries);
        // Closing may take long, so it happens without the lock.
        drop(removed);
        entry
    }
}
